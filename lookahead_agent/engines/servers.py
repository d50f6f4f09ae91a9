"""Requests to an OpenAI-compatible server: retries, timeouts, and errors in responses."""

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

_RETRYABLE_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
_FIRST_DELAY = 0.25
_MAX_DELAY = 8.0
_CONNECT_TIMEOUT = 5.0


@dataclass(frozen=True)
class RemoteModel:
    """A model behind an OpenAI-compatible server, or behind a load balancer in front of several."""

    url: str  # base URL, including `/v1`
    model: str | None = None  # name of the model on the server; None: its only model
    api_key: str | None = field(default=None, repr=False)  # sent as a bearer token; None: not sent
    timeout: float | None = 600.0  # seconds without data before a request fails; None: no limit
    max_retries: int = 2  # retries of a request that failed before any response


class _UnavailableError(EngineError):
    """A request failed and may be retried if no response has begun; `retry_after` is the requested delay in seconds."""

    retry_after: float | None = None


class Server:
    """A client of one model's server; `role` names the model in messages, `transport` replaces the network in tests."""

    def __init__(self, remote: RemoteModel, role: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.answers = True  # whether the server responded to the latest request
        self._remote = remote
        self._url = remote.url.rstrip("/")
        self._name = f"the {role} at {self._url}"
        headers = {"Authorization": f"Bearer {remote.api_key}"} if remote.api_key else {}
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(remote.timeout, connect=_CONNECT_TIMEOUT, pool=None),
            # No limit on connections: the engine decides which requests wait.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
        )

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a POST, or a GET without a body, and return the JSON response.

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
                await self._wait_before_retry(failure, failures)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the server-sent events of a POST; see `ask`. Closing the generator closes the connection."""
        for failures in count():
            started = False
            try:
                async with aclosing(self._events(path, body)) as received:
                    async for event in received:
                        started = True
                        yield event
                return
            except _UnavailableError as failure:
                await self._wait_before_retry(failure, self._remote.max_retries if started else failures)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _wait_before_retry(self, failure: _UnavailableError, failures: int) -> None:
        self.answers = False
        if failures >= self._remote.max_retries:
            raise failure
        delay = failure.retry_after
        if delay is None:
            # With jitter, so that requests that failed together do not retry together.
            delay = _FIRST_DELAY * 2**failures * random.uniform(0.75, 1.25)
        await asyncio.sleep(min(delay, _MAX_DELAY))

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
                            raise self._event_error(event)
                        yield event

    def _event_error(self, event: Mapping[str, Any]) -> EngineError | ConfigurationError:
        """The error of an event that a server sends in place of a part of the reply."""
        match event["error"]:
            # vLLM's error has the status that the response would have had if the stream had not started.
            case {"code": int() as status} if 400 <= status < 500 and status not in _RETRYABLE_STATUSES:
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
        if status in _RETRYABLE_STATUSES:
            failure = _UnavailableError(f"{self._name} answered {status}: {_reason(response)}")
            with suppress(KeyError, ValueError):  # the header may also hold a date
                failure.retry_after = float(response.headers["Retry-After"])
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
    value = answer
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return str(value)[:500]


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield the data of each server-sent event in a body of chunks, also of a last one without a closing empty line.

    A line ends with a line feed, a carriage return, or both, and with no other character of `str.splitlines`.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True)

    async def decoded() -> AsyncIterator[str]:
        async for chunk in chunks:
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True) + "\n\n"

    data: list[str] = []
    parts: list[str] = []  # pieces of the incomplete line, joined once
    async for text in decoded():
        *complete, incomplete = text.split("\n")
        for end in complete:
            line = "".join([*parts, end])
            parts.clear()
            field, _, value = line.partition(":")
            if field == "data":
                data.append(value.removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []
        parts.append(incomplete)
