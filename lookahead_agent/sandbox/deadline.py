"""HTTP with one deadline over everything: a transport for httpx, on a network backend of httpcore."""

import ssl
import time
from typing import Any

import httpcore
import httpx


class DeadlineTransport(httpx.HTTPTransport):
    """Connects, writes and reads until a moment, and not after: also where a byte comes now and then.

    Args:
        end: The moment, on `time.monotonic()`'s clock, in seconds.
    """

    def __init__(self, end: float) -> None:
        context = httpx.create_ssl_context(trust_env=False)
        super().__init__(verify=context, trust_env=False)
        # httpx has no argument for the network backend.
        self._pool = httpcore.ConnectionPool(ssl_context=context, network_backend=_Backend(end), retries=0)


class _Backend(httpcore.NetworkBackend):
    def __init__(self, end: float) -> None:
        self._end = end
        self._real = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        left = _left(self._end, httpcore.ConnectTimeout)
        return _Stream(self._real.connect_tcp(host, port, left, local_address, socket_options), self._end)


class _Stream(httpcore.NetworkStream):
    def __init__(self, real: httpcore.NetworkStream, end: float) -> None:
        self._real = real
        self._end = end

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._real.read(max_bytes, _left(self._end, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._real.write(buffer, _left(self._end, httpcore.WriteTimeout))

    def close(self) -> None:
        self._real.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(self._end, httpcore.ConnectTimeout)
        return _Stream(self._real.start_tls(ssl_context, server_hostname, left), self._end)

    def get_extra_info(self, info: str) -> Any:
        return self._real.get_extra_info(info)


def _left(end: float, error: type[httpcore.TimeoutException]) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise error("the time is over")
    return left
