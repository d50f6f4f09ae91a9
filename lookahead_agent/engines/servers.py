"""Requests to an OpenAI-compatible server: what is tried again, and what an answer means."""

import asyncio
import codecs
import io
import json
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError

_MAY_BE_REPEATED = frozenset({408, 425, 429, 502, 503, 504})
_FIRST_DELAY = 0.25
_LONGEST_DELAY = 8.0
_CONNECT_TIMEOUT = 5.0


@dataclass(frozen=True)
class RemoteModel:
    """A model behind an OpenAI-compatible server, or behind a load balancer before several."""

    url: str  # its address up to and with `/v1`
    model: str | None = None  # its name there; None: the only one that it has
    api_key: str | None = field(default=None, repr=False)  # sent as a bearer token; None: none
    timeout: float | None = 600.0  # seconds without a sign of life after which a request has failed; None: never
    max_retries: int = 2  # times a request is repeated that failed before anything was answered


class _UnavailableError(EngineError):
    """A request failed before anything was answered; `pause` is how long the server wants to be left alone."""

    pause: float | None = None


class Server:
    """The server of one model, which has a `role` in messages; `transport` replaces the network, for tests."""

    def __init__(self, remote: RemoteModel, role: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.answers = True  # whether it has answered the last time
        self._remote = remote
        self._url = remote.url.rstrip("/")
        self._name = f"the {role} at {self._url}"
        headers = {"Authorization": f"Bearer {remote.api_key}"} if remote.api_key else {}
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(remote.timeout, connect=_CONNECT_TIMEOUT, pool=None),
            # As many connections as there are requests: the engine decides what waits.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
        )

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to a POST, or to a GET without a body.

        Raises EngineError if there is none, and ConfigurationError if the server refuses the request.
        """
        for failures in count():
            try:
                with self._errors():
                    method = "GET" if body is None else "POST"
                    response = await self._client.request(method, self._url + path, json=body)
                    self._check(response)
                    return response.json()
            except _UnavailableError as failure:
                await self._before_next_try(failure, failures)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Server-sent events of a POST; see `ask`. Closing the generator closes the connection."""
        for failures in count():
            begun = False
            try:
                async with aclosing(self._events(path, body)) as come:
                    async for event in come:
                        begun = True
                        yield event
                return
            except _UnavailableError as failure:
                await self._before_next_try(failure, self._remote.max_retries if begun else failures)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _before_next_try(self, failure: _UnavailableError, failures: int) -> None:
        self.answers = False
        if failures >= self._remote.max_retries:
            raise failure
        pause = failure.pause
        if pause is None:
            # Spread out, so that many requests that failed together do not come back together.
            pause = _FIRST_DELAY * 2**failures * random.uniform(0.75, 1.25)
        await asyncio.sleep(min(pause, _LONGEST_DELAY))

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        with self._errors():
            async with self._client.stream("POST", self._url + path, json=body) as response:
                if response.is_error:
                    await response.aread()
                self._check(response)
                async for data in events(response.aiter_bytes()):
                    if data.strip() == "[DONE]":
                        return
                    if data.strip():
                        event = json.loads(data)
                        if isinstance(event, dict) and "error" in event:
                            raise self._failed(event)
                        yield event

    def _failed(self, event: Mapping[str, Any]) -> EngineError | ConfigurationError:
        """The error that a server sends where its reply would be."""
        match event["error"]:
            # vLLM's has its status, with which it would have answered had the reply not begun.
            case {"code": int() as status} if 400 <= status < 500 and status not in _MAY_BE_REPEATED:
                return ConfigurationError(f"{self._name} refuses the request ({status}): {_message(event)}")
        return EngineError(f"{self._name} failed: {_message(event)}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ReadTimeout as error:
            raise _UnavailableError(f"{self._name} gave no sign of life for {self._remote.timeout:g} s") from error
        except httpx.HTTPError as error:
            raise _UnavailableError(f"{self._name} cannot be reached: {str(error) or type(error).__name__}") from error
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self._name} sent something that is not JSON") from error

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status in _MAY_BE_REPEATED:
            failure = _UnavailableError(f"{self._name} answered {status}: {_reason(response)}")
            with suppress(KeyError, ValueError):  # it may also be a date
                failure.pause = float(response.headers["Retry-After"])
            raise failure
        self.answers = True
        if not response.is_error:
            return
        reason = _reason(response)
        if status in (401, 403):
            raise ConfigurationError(f"{self._name} refuses the API key ({status}): {reason}")
        if status in (400, 422) and "context" in reason.lower():
            raise ContextLengthError(f"{self._name} refuses the request: {reason}")
        if 400 <= status < 500:
            raise ConfigurationError(f"{self._name} refuses the request ({status}): {reason}")
        raise EngineError(f"{self._name} answered {status}: {reason}")


def _reason(response: httpx.Response) -> str:
    try:
        return _message(response.json())
    except ValueError:
        return response.text[:200]


def _message(answer: Any) -> str:
    found = answer
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:500]


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The data of each event of a body that comes in chunks, also of a last one that no empty line ends.

    A line ends with a line feed, a carriage return, or both, and with no other character of `str.splitlines`.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True)

    async def texts() -> AsyncIterator[str]:
        async for chunk in chunks:
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True) + "\n\n"

    data: list[str] = []
    parts: list[str] = []  # of the line that is not complete, joined once
    async for text in texts():
        *complete, rest = text.split("\n")
        for end in complete:
            line = "".join([*parts, end])
            parts.clear()
            field, _, value = line.partition(":")
            if field == "data":
                data.append(value.removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []
        parts.append(rest)
