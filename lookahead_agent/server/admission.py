"""Admits requests: by the name of the server in them, by their key, and so many at once."""

import asyncio
import ipaddress
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lookahead_agent.server.errors import ErrorReplies, RefusedError


class HostCheck:
    """Middleware that answers only to allowed names.

    A web page of any site may have its own name resolve to this machine's address (DNS rebinding): its requests come
    with that name as their `Host`. An IP address as `Host` cannot be such a page's, nor can none at all.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], errors: ErrorReplies) -> None:
        self._app = app
        self._allowed = {name.lower().rstrip(".") for name in allowed}
        self._endings = tuple(name[1:] for name in self._allowed if name.startswith("*"))
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._is_allowed(host):
            await self._app(scope, receive, send)
            return
        message = f"the server is not called {host[:100]!r}: its owner can allow the name with --allowed-host"
        await self._errors.response(RefusedError(400, message))(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower().rstrip(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._allowed or name.endswith(self._endings)
        return True


def check_key(given: str | None, expected: str | None) -> None:
    """Check the `Authorization` header of a request."""
    if expected is None:
        return
    scheme, _, key = (given or "").partition(" ")
    equal = secrets.compare_digest(key.strip().encode(), expected.encode())
    if scheme.lower() != "bearer" or not equal:
        raise RefusedError(
            401,
            "the API key is wrong or missing: send it as 'Authorization: Bearer …'",
            headers={"WWW-Authenticate": "Bearer"},
        )


class Admission:
    """Lets so many replies be generated at once, so many wait, and refuses the rest."""

    def __init__(self, concurrent: int, queue: int) -> None:
        self._concurrent = concurrent
        self._queue = queue
        self._slots = asyncio.Semaphore(concurrent)
        self._seconds = 1.0
        self.running = 0  # Replies that are being generated
        self.waiting = 0  # Replies that wait

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for one's turn, and have it while the context lasts."""
        if self.running >= self._concurrent and self.waiting >= self._queue:
            wait = math.ceil(self._seconds * (self.waiting + 1) / self._concurrent)
            raise RefusedError(
                429,
                f"{self.running} replies are being generated and {self.waiting} wait: try again later",
                code="queue_full",
                headers={"Retry-After": str(wait)},
            )
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()
            # How long a reply takes lately, for those who ask when to come again.
            self._seconds += 0.2 * (time.monotonic() - started - self._seconds)
