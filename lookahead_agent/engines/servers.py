"""Requests to OpenAI-compatible servers: which replica gets one, what is tried again, and what an answer means."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError

logger = logging.getLogger(__name__)

_MAY_BE_REPEATED = frozenset({408, 425, 429, 502, 503, 504})
_FIRST_DELAY = 0.25
_LONGEST_DELAY = 8.0
_FIRST_EJECTION = 0.5
_LONGEST_EJECTION = 30.0
_CONNECT_TIMEOUT = 5.0


@dataclass(frozen=True)
class RemoteModel:
    """A model behind one or several OpenAI-compatible servers that are replicas of each other.

    Attributes:
        urls: Their addresses up to and with `/v1`.
        model: Its name there; None: the only one that they have.
        api_key: Sent as a bearer token; None: none.
        timeout: Seconds without a sign of life after which a request has failed; None: never.
        max_retries: Times a request is repeated that failed before anything was answered.
    """

    urls: tuple[str, ...]
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float | None = 600.0
    max_retries: int = 2

    @property
    def key(self) -> str:
        """Text that is equal for equal values."""
        return repr((self.urls, self.model, self.api_key, self.timeout, self.max_retries))


@dataclass
class Replica:
    """One server.

    Attributes:
        url: Its address up to and with `/v1`.
        in_flight: Requests that it works on.
        failures: How often it has failed since it last answered.
        ejected_until: When it may be asked again, on the clock of `Replicas`.
    """

    url: str
    in_flight: int = 0
    failures: int = 0
    ejected_until: float = 0.0


class Replicas:
    """Servers of one model: the least busy gets the next request, one that fails is left alone for a while.

    Args:
        urls: Their addresses.
        now: Clock in seconds.
    """

    def __init__(self, urls: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        self.all = [Replica(url.rstrip("/")) for url in urls]
        self._now = now

    def choose(self, affinity: bytes = b"", tried: Sequence[Replica] = ()) -> Replica:
        """The replica for a request.

        Among equally busy ones, requests of one `affinity` go to the same: it has their prefix in its cache. Ejected
        and tried ones are only asked if there are no others.
        """

        def rank(replica: Replica) -> tuple[bool, float, int, bytes]:
            wait = max(0.0, replica.ejected_until - self._now())
            digest = hashlib.blake2b(affinity + replica.url.encode(), digest_size=8).digest()
            return any(replica is other for other in tried), wait, replica.in_flight, digest

        return min(self.all, key=rank)

    @contextmanager
    def working(self, replica: Replica) -> Iterator[None]:
        """Count a request."""
        replica.in_flight += 1
        try:
            yield
        finally:
            replica.in_flight -= 1

    def failed(self, replica: Replica) -> None:
        """Leave a replica alone, the longer the more often it has failed."""
        pause = min(_LONGEST_EJECTION, _FIRST_EJECTION * 2**replica.failures)
        replica.failures += 1
        replica.ejected_until = self._now() + pause

    def answered(self, replica: Replica) -> None:
        """Forget a replica's failures."""
        replica.failures = 0
        replica.ejected_until = 0.0


class _TryAgainError(Exception):
    """A request failed before anything was answered; `pause` is how long the server wants to be left alone."""

    def __init__(self, error: EngineError, pause: float | None = None) -> None:
        self.error = error
        self.pause = pause


class Servers:
    """The servers of one model.

    Args:
        remote: Which, and how they are asked.
        role: What the model is here, for messages: "target", "draft", "judge" or "embedding model".
        transport: Replaces the network, for tests.
    """

    def __init__(self, remote: RemoteModel, role: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.replicas = Replicas(remote.urls)
        self._remote = remote
        self._role = role
        headers = {"Authorization": f"Bearer {remote.api_key}"} if remote.api_key else {}
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(remote.timeout, connect=_CONNECT_TIMEOUT, pool=None),
            # As many connections as there are requests: the engine decides what waits.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
        )

    async def get(self, path: str) -> Any:
        """Answer to a GET.

        Raises:
            EngineError: No server gave one.
            ConfigurationError: The servers refuse it.
        """
        return await self._repeated(lambda replica: self._once("GET", replica, path, None), b"")

    async def post(self, path: str, body: Mapping[str, Any], affinity: bytes = b"") -> Any:
        """Answer to a POST; see `get`."""
        return await self._repeated(lambda replica: self._once("POST", replica, path, body), affinity)

    async def stream(self, path: str, body: Mapping[str, Any], affinity: bytes = b"") -> AsyncGenerator[Any, None]:
        """Server-sent events of a POST. Closing the generator closes the connection, so that the server stops.

        Raises:
            EngineError: No server answered, or one stopped in the middle.
            ConfigurationError: The servers refuse it.
        """
        tried: list[Replica] = []
        while True:
            replica = self.replicas.choose(affinity, tried)
            begun = False
            try:
                with self.replicas.working(replica):
                    async with aclosing(self._events(replica, path, body)) as come:
                        async for event in come:
                            begun = True
                            yield event
                return
            except _TryAgainError as failure:
                if begun:
                    self.replicas.failed(replica)
                    raise failure.error from failure.__cause__
                await self._before_next_try(replica, tried, failure)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _repeated(self, ask: Callable[[Replica], Any], affinity: bytes) -> Any:
        tried: list[Replica] = []
        while True:
            replica = self.replicas.choose(affinity, tried)
            try:
                with self.replicas.working(replica):
                    return await ask(replica)
            except _TryAgainError as failure:
                await self._before_next_try(replica, tried, failure)

    async def _before_next_try(self, replica: Replica, tried: list[Replica], failure: _TryAgainError) -> None:
        """Wait until the next try, or give up."""
        self.replicas.failed(replica)
        tried.append(replica)
        if len(tried) > self._remote.max_retries:
            raise failure.error from failure.__cause__
        if len(tried) < len(self.replicas.all):
            return  # another replica may answer at once
        pause = failure.pause
        if pause is None:
            # Spread out, so that many requests that failed together do not come back together.
            pause = _FIRST_DELAY * 2 ** (len(tried) - 1) * random.uniform(0.75, 1.25)
        await asyncio.sleep(min(pause, _LONGEST_DELAY))

    async def _once(self, method: str, replica: Replica, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = await self._client.request(method, replica.url + path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(replica, error) from error
        self._check(replica, response)
        self.replicas.answered(replica)
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self._name(replica)} answered with something that is not JSON") from error

    async def _events(self, replica: Replica, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        try:
            async with self._client.stream("POST", replica.url + path, json=body) as response:
                if response.is_error:
                    await response.aread()
                self._check(replica, response)
                self.replicas.answered(replica)
                async for data in events(response.aiter_bytes()):
                    if not data.strip():
                        continue
                    if data.strip() == "[DONE]":
                        return
                    event = json.loads(data)
                    if isinstance(event, dict) and "error" in event:
                        raise self._failed(replica, event)
                    yield event
        except httpx.HTTPError as error:
            raise self._unreachable(replica, error) from error
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self._name(replica)} sent something that is not JSON") from error

    def _failed(self, replica: Replica, event: Mapping[str, Any]) -> EngineError | ConfigurationError:
        """The error that a server sends where its reply would be."""
        match event["error"]:
            # vLLM's has its status, with which it would have answered had the reply not begun.
            case {"code": int() as status} if 400 <= status < 500 and status not in _MAY_BE_REPEATED:
                return ConfigurationError(f"{self._name(replica)} refuses the request ({status}): {_message(event)}")
        return EngineError(f"{self._name(replica)} failed: {_message(event)}")

    def _name(self, replica: Replica) -> str:
        return f"the {self._role} at {replica.url}"

    def _unreachable(self, replica: Replica, error: httpx.HTTPError) -> _TryAgainError:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ReadTimeout):
            return _TryAgainError(
                EngineError(f"{self._name(replica)} gave no sign of life for {self._remote.timeout:g} s")
            )
        return _TryAgainError(EngineError(f"{self._name(replica)} cannot be reached: {reason}"))

    def _check(self, replica: Replica, response: httpx.Response) -> None:
        if not response.is_error:
            return
        status, reason = response.status_code, _reason(response)
        if status in _MAY_BE_REPEATED:
            raise _TryAgainError(EngineError(f"{self._name(replica)} answered {status}: {reason}"), _pause(response))
        self.replicas.answered(replica)
        if status in (401, 403):
            raise ConfigurationError(f"{self._name(replica)} refuses the API key ({status}): {reason}")
        if status in (400, 422) and "context" in reason.lower():
            raise ContextLengthError(f"{self._name(replica)} refuses the request: {reason}")
        if 400 <= status < 500:
            raise ConfigurationError(f"{self._name(replica)} refuses the request ({status}): {reason}")
        raise EngineError(f"{self._name(replica)} answered {status}: {reason}")


def _pause(response: httpx.Response) -> float | None:
    try:
        return float(response.headers["Retry-After"])
    except (KeyError, ValueError):  # it may also be a date
        return None


def _reason(response: httpx.Response) -> str:
    try:
        return _message(response.json())
    except ValueError:
        return response.text[:200]


def _message(answer: Any) -> str:
    """The message in an error of any of the usual forms."""
    found = answer
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:500]


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The data of each event of a body that comes in chunks, wherever these are cut.

    A line ends with a line feed, a carriage return, or both, and with no other character: those that `str.splitlines`
    takes for ends of lines too may occur in the data. An event that is not ended by an empty line counts, since some
    servers leave out the last one.
    """
    data: list[str] = []
    async for line in _lines(chunks):
        if not line:
            if data:
                yield "\n".join(data)
            data = []
            continue
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" ").decode(errors="replace"))
    if data:
        yield "\n".join(data)


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    parts: list[bytes] = []  # of the line that is not complete, joined once
    first, after_return = True, False
    async for chunk in chunks:
        if not chunk:
            continue
        if after_return:  # the line feed after it is of the same end
            chunk = chunk.removeprefix(b"\n")
        after_return = chunk.endswith(b"\r")
        *complete, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in complete:
            whole = b"".join([*parts, line])
            parts.clear()
            yield whole.removeprefix(codecs.BOM_UTF8) if first else whole
            first = False
        parts.append(rest)
    if whole := b"".join(parts):
        yield whole.removeprefix(codecs.BOM_UTF8) if first else whole
