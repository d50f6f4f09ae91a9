"""Requests to an OpenAI-compatible server: retries, timeouts, and errors in responses.

`events` is not `httpx-sse` 0.4, which joins a line and an event of any length, and drops a last event without an empty
line. Retries are not `httpx-retries` 0.6, a transport: it retries no stream that fails after its headers. `stamina` 26
would do so, in as many lines as here, but any program can disable it for the whole process.
"""

import asyncio
import codecs
import html
import io
import json
import math
import os
import random
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import quote

import httpx

from lookahead_agent.engines.affinity import AFFINITY_HEADERS, RANK_HEADER, SESSION_TOKEN, affinity_key
from lookahead_agent.engines.continuation import UnavailableError
from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError
from lookahead_agent.system.background import describe
from lookahead_agent.system.urls import without_secrets

_RETRYABLE_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
_GATEWAY_STATUSES = frozenset({502, 503, 504})  # statuses of a balancer without servers
_AWAY_STATUSES = _GATEWAY_STATUSES | {500}  # these, and the status of a server whose engine has ended
_FIRST_DELAY = 0.25
_MAX_DELAY = 8.0
_CONNECT_TIMEOUT = 5.0
_MAX_BYTES = 64 << 20  # bytes of a response that is not a stream
_MAX_ERROR_BYTES = 64 << 10  # bytes that are read of an error's response
_MAX_SESSION = 4096  # characters of the token and cookies that are kept for a reply
_MAX_SESSIONS = 4096
_MAX_EVENT = 16 << 20  # characters of an event in a stream
_CONTEXT = re.compile(
    r"context|too many (?:prompt |input )?tokens|(?:prompt|input) is too long|reduce the length|tokens.*must be <=",
    re.I,
)
# The same in an error with another status, or with none, where "context" alone may be that of a GPU.
_CONTEXT_ERROR = re.compile(
    r"context[ _]?(?:length|window|size)|maximum context|too many (?:prompt |input )?tokens|"
    r"(?:prompt|input) is too long",
    re.I,
)
_REFUSAL_TYPES = frozenset({"invalid_request_error", "BadRequestError"})  # types of errors whose code is a word
_DEAD = re.compile(r"EngineCore|EngineDead|engine (?:is )?dead", re.I)  # vLLM's errors once its engine has ended
_FRAME = frozenset({"id", "object", "created", "model", "choices", "usage", "system_fingerprint"})


@dataclass(frozen=True)
class RemoteModel:
    """A model behind an OpenAI-compatible server, or behind a load balancer in front of several."""

    url: str  # base URL, including `/v1`
    model: str | None = None  # name of the model on the server; None: its only model
    api_key: str | None = field(default=None, repr=False)  # sent as a bearer token; None: not sent
    timeout: float | None = 600.0  # seconds without data before a request fails; None: no limit
    # Failures in a row, without a new token between them, after which a request is sent again. 0: no request is sent
    # again. Neither a response with `Retry-After` counts, nor, once a server has begun the reply, a server that is
    # away, nor, once it has begun any reply, a balancer without servers: the request waits as long as `timeout`.
    max_retries: int = 2
    affinity_headers: tuple[str, ...] = AFFINITY_HEADERS  # headers with the key of a reply, for load balancers


class LineTooLongError(ValueError):
    """A stream has an event without an end."""


async def read_at_most(response: httpx.Response, limit: int) -> bytes:
    """Read the first `limit` bytes of a body, which may have no end."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) >= limit:
            break
    return bytes(content[:limit])


class UnfinishedEvent(str):
    """The data of a stream's last event, without the empty line that ends an event."""


class Retries:
    """The failures of one request since its latest token, and the wait before its next attempt."""

    def __init__(self, remote: RemoteModel) -> None:
        self._remote = remote
        self.reset()

    def reset(self) -> None:
        """Forget the failures: the request has a new token."""
        self._failures = 0  # those that count
        self._attempts = 0
        self._since: float | None = None  # time of the first failure

    async def wait(self, failure: UnavailableError, *, in_reply: bool = False) -> None:
        """Wait before another attempt; raises the failure if there is none.

        Args:
            failure: Why the latest attempt failed.
            in_reply: Whether the request belongs to a reply that a server has begun, which waits for one that is away.
        """
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        waits = failure.retry_after is not None or (in_reply and failure.is_away)
        self._failures += not waits
        is_last = self._remote.max_retries == 0 or self._failures > self._remote.max_retries
        if is_last or failure.has_timed_out or (failure.needs_tokens and not in_reply):
            raise failure
        # The delay has jitter, so that requests that failed together do not retry together.
        delay = min(_MAX_DELAY, _FIRST_DELAY * 2 ** min(self._attempts, 16)) * random.uniform(0.75, 1.25)
        if in_reply and not self._attempts:  # another replica may continue the reply at once
            delay = 0.0
        self._attempts += 1
        delay = max(failure.retry_after or 0.0, delay)
        if now + delay - self._since > (self._remote.timeout or math.inf):
            raise failure
        await asyncio.sleep(delay)


class Server:
    """A client of one model's server; `role` names the model in messages, `transport` replaces the network in tests."""

    def __init__(self, remote: RemoteModel, role: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.answers = True  # whether the server responded to the latest request
        self._remote = remote
        self._url = remote.url.rstrip("/")
        self.name = f"the {role} at {without_secrets(self._url)}"
        self._key = check_key(remote.api_key, f"the {role}'s API key")
        self._spellings = _spellings(self._key) if self._key else []
        self._transport = transport
        self.ranks = 1  # data-parallel replicas behind the address, among which this client chooses
        self._sessions: OrderedDict[str, dict[str, str]] = OrderedDict()  # headers that a balancer wants back, by key
        self._connect()

    def _connect(self) -> None:
        self._process = os.getpid()
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx.Timeout(self._remote.timeout, connect=_CONNECT_TIMEOUT, pool=None),
            # No limit on connections: the engine decides which requests wait.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=self._transport,
            # A cookie of one reply's replica must not draw all replies to it.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )

    def _affinity(self, key: str | None) -> dict[str, str]:
        """The headers that send a request to the replica of its reply, by the reply's key."""
        if key is None:
            return {}
        ranks = {RANK_HEADER: str(int(key, 16) % self.ranks)} if self.ranks > 1 else {}
        return dict.fromkeys(self._remote.affinity_headers, key) | ranks | self._sessions.get(key, {})

    def _remember_session(self, key: str | None, response: httpx.Response) -> None:
        """Keep the name of the replica that a balancer gave to a reply, as a token (llm-d) or cookies."""
        token, cookies = response.headers.get(SESSION_TOKEN), dict(response.cookies)
        if key is None or not (token or cookies):
            return
        values = {SESSION_TOKEN: token} if token else {}
        values |= {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())} if cookies else {}
        text = "".join(values.values())
        # No request could carry other characters.
        if len(text) <= _MAX_SESSION and text.isascii() and text.isprintable():
            self._sessions[key] = self._sessions.pop(key, {}) | values
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    @asynccontextmanager
    async def _response(
        self, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a POST, or a GET without a body; the response is not read yet."""
        if os.getpid() != self._process:  # forked: the connections belong to the parent
            self._connect()
        method = "GET" if body is None else "POST"
        key = affinity_key(self._key) if self._remote.affinity_headers else None
        sent = self._affinity(key) | dict(headers or {})
        async with self._client.stream(method, self._url + path, json=body, headers=sent) as response:
            self._remember_session(key, response)
            # A few kilobytes may decompress to gigabytes, at once.
            if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
                status = response.status_code
                raise EngineError(f"{self.name} sent a compressed response ({status}), which the request excludes")
            yield response

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = math.inf,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a POST, or a GET without a body, and return the JSON response.

        Raises EngineError if there is none in time, and ConfigurationError if the server refuses the request.
        """
        limit = min(seconds, self._remote.timeout or math.inf)
        retries = Retries(self._remote)
        while True:
            try:
                with self._errors(limit):
                    async with (
                        asyncio.timeout(limit if limit < math.inf else None),
                        self._response(path, body, headers) as response,
                    ):
                        content = await self._content(response)
                    return json.loads(content)
            except UnavailableError as failure:
                self.note_failure(failure)
                await retries.wait(failure)

    def note_failure(self, failure: UnavailableError) -> None:
        """Record that a request failed: the next one of its reply may go to another replica."""
        self.answers = failure.retry_after is not None
        if not self.answers and (key := affinity_key(self._key)) is not None:
            self._sessions.pop(key, None)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the server-sent events of a POST, which is sent once; see `ask`. Closing the generator closes the
        connection.

        Raises UnavailableError also if the stream ends before the event that closes it.
        """
        limit = self._remote.timeout or math.inf
        async with AsyncExitStack() as stack:
            with self._errors(limit):
                async with asyncio.timeout(self._remote.timeout):
                    response = await stack.enter_async_context(self._response(path, body))
                    if not response.is_success:
                        await self._content(response)
                self.answers = True
            received = events(response.aiter_bytes())
            while True:
                with self._errors(limit):
                    async with asyncio.timeout(self._remote.timeout):
                        event = await self._next_event(received)
                if event is None:
                    return
                yield event

    async def _next_event(self, received: AsyncIterator[str]) -> Any:
        """The next event that says something, since empty events and comments may come from a proxy; None: the end."""
        async for data in received:
            if data.strip() == "[DONE]":
                return None
            try:
                event = json.loads(data) if data.strip() else {}
            except ValueError:
                if not isinstance(data, UnfinishedEvent):
                    raise
                break
            if isinstance(event, dict) and ("error" in event or event.get("object") == "error"):
                raise self._event_error(event)
            if not _is_empty(event):
                return event
        raise UnavailableError(f"{self.name} ended the stream of a reply early")

    async def _content(self, response: httpx.Response) -> bytes:
        """Read a response of limited size, and raise the error that it tells."""
        limit = _MAX_BYTES if response.is_success else _MAX_ERROR_BYTES
        content = await read_at_most(response, limit + 1)
        if response.is_success and len(content) > limit:
            raise EngineError(f"{self.name} sent more than {limit >> 20} MiB")
        self._check(response, content[:limit])
        return content

    def _event_error(self, event: Mapping[str, Any]) -> EngineError | ConfigurationError:
        """The error of an event that a server sends in place of a part of the reply."""
        error, message = event.get("error") or event, self._message(event)
        if _CONTEXT_ERROR.search(json.dumps(error)):
            return self._refusal(400, message, is_context=True)
        match error:
            # vLLM's error has the status that the response would have had if the stream had not started.
            case {"code": int() as status} if 400 <= status < 500 and status not in _RETRYABLE_STATUSES:
                return self._refusal(status, message)
            case {"type": str() as kind, **rest} if kind in _REFUSAL_TYPES and not isinstance(rest.get("code"), int):
                return self._refusal(400, message)
        failure = UnavailableError(f"{self.name} failed: {message}")
        failure.needs_tokens = _DEAD.search(message) is None  # the server would answer so again
        return failure

    @contextmanager
    def _errors(self, limit: float) -> Iterator[None]:
        """Raise EngineError, which never has the API key, for everything that can go wrong in a request.

        Transports are foreign code: their cancellations and exits must not end the task that reads the reply.
        """
        try:
            yield
        except (EngineError, ConfigurationError):
            raise
        except (httpx.ReadTimeout, TimeoutError):
            raise self.timeout_error(limit) from None
        except httpx.HTTPError as error:
            if "location header" in describe(error):  # httpx reads the address of a redirect, and may quote it
                raise ConfigurationError(f"{self.name} redirects to an invalid address") from None
            failure = UnavailableError(f"{self.name} cannot be reached: {self.without_key(describe(error))}")
            failure.is_away = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            raise failure from None
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, LineTooLongError) else "something that is not JSON"
            raise EngineError(f"{self.name} sent {reason}") from None
        except GeneratorExit:
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise EngineError(f"{self.name} failed: {self.without_key(describe(error))}") from None

    def timeout_error(self, limit: float) -> UnavailableError:
        """The error for a server that sent nothing of a reply for this time, in seconds."""
        patience = f"{limit:g} s" if limit < math.inf else "its limit"
        failure = UnavailableError(f"{self.name} timed out: it sent nothing of a reply for {patience}")
        failure.has_timed_out = True
        return failure

    def _check(self, response: httpx.Response, content: bytes) -> None:
        status = response.status_code
        reason = self._reason(content)
        is_context = not response.is_success and _CONTEXT_ERROR.search(content.decode(errors="replace")) is not None
        if is_context and status >= 500:
            self.answers = True
            raise self._refusal(status, reason, is_context=True)
        if status in _RETRYABLE_STATUSES or status >= 500:
            failure = UnavailableError(f"{self.name} answered {status}: {reason}")
            failure.is_away = status in _AWAY_STATUSES
            failure.is_of_gateway = status in _GATEWAY_STATUSES
            failure.needs_tokens = status not in _RETRYABLE_STATUSES and _DEAD.search(reason) is None
            with suppress(KeyError, ValueError):  # the header may also hold a date
                seconds = float(response.headers["Retry-After"])
                failure.retry_after = seconds if seconds >= 0 and status in (429, 503) else None  # not for NaN
            raise failure
        self.answers = True
        if response.is_success:
            return
        if 300 <= status < 400:
            place = self.without_key(without_secrets(response.headers.get("Location", "")))
            raise ConfigurationError(
                f"{self.name} redirects to {place[:300] or 'another address'} ({status}): give that address"
            )
        if 400 <= status < 500:
            raise self._refusal(status, reason, is_context=is_context)
        raise EngineError(f"{self.name} answered {status}: {reason}")

    def _refusal(self, status: int, reason: str, *, is_context: bool = False) -> ConfigurationError:
        """The error for a request that the server refuses; `is_context`: surely because of its length."""
        if status in (401, 403):
            return ConfigurationError(f"{self.name} refuses the API key ({status}): {reason}")
        if is_context or (status in (400, 413, 422) and _CONTEXT.search(reason)):
            return ContextLengthError(f"{self.name} refuses the request: {reason}")
        return ConfigurationError(f"{self.name} refuses the request ({status}): {reason}")

    def _reason(self, content: bytes) -> str:
        try:
            return self._message(json.loads(content))
        except (ValueError, RecursionError):
            return self.without_key(content.decode(errors="replace"))[:200]

    def _message(self, answer: Any) -> str:
        value = answer
        for key in ("error", "message", "detail"):
            if isinstance(value, dict) and key in value:
                value = value[key]
        return self.without_key(str(value))[:500]

    def without_key(self, text: str) -> str:
        """A server's text without the API key, which some servers repeat in their errors."""
        for spelling in self._spellings:
            text = text.replace(spelling, "<API key>")
        return text


def check_key(key: str | None, name: str) -> str | None:
    """An API key without white space around it, as from a file; None for an empty one.

    Raises ConfigurationError, which calls the key `name`, for a character that no HTTP header may have.
    """
    stripped = (key or "").strip()
    if (place := next((place for place, letter in enumerate(stripped) if not "!" <= letter <= "~"), None)) is not None:
        raise ConfigurationError(
            f"{name} has a character that no HTTP header may have, the one at {place}: copy the key once more"
        )
    return stripped or None


def _spellings(key: str) -> list[str]:
    """A key as a server or a library may quote it: as it is, as in Python, JSON, an address or HTML; longest first."""
    in_python = key.replace("\\", "\\\\")
    quoted = {in_python, in_python.replace("'", "\\'"), json.dumps(key)[1:-1], quote(key), quote(key, safe="")}
    return sorted({key, *quoted, html.escape(key), html.escape(key, quote=False)}, key=len, reverse=True)


def _is_empty(event: Any) -> bool:
    """Whether an event has nothing of a reply: no text, token, reason of the end, or usage."""
    if not isinstance(event, dict):
        return False
    choices = event.get("choices")
    if event.keys() - _FRAME or event.get("usage") or not isinstance(choices, (list, type(None))):
        return False
    return not any(
        not isinstance(choice, dict) or any(value for name, value in choice.items() if name != "index")
        for choice in choices or ()
    )


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield the data of each server-sent event in a body of chunks; a last one may be an `UnfinishedEvent`.

    A line ends with a line feed, a carriage return, or both, and with no other character of `str.splitlines`.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True)
    kind: type[str] = str

    async def decode_chunks() -> AsyncIterator[str]:
        nonlocal kind
        async for chunk in chunks:
            yield decoder.decode(chunk)
        kind = UnfinishedEvent
        yield decoder.decode(b"", final=True) + "\n\n"

    data: list[str] = []
    parts: list[str] = []  # pieces of the incomplete line, joined once
    length = 0  # characters of the incomplete event
    async for text in decode_chunks():
        *complete, incomplete = text.split("\n")
        length = length + len(text)
        if length > _MAX_EVENT and not any(not line for line in complete):
            raise LineTooLongError(f"an event of more than {_MAX_EVENT >> 20} MiB")
        for end in complete:
            line = "".join([*parts, end])
            parts.clear()
            field, _, value = line.partition(":")
            if field == "data":
                data.append(value.removeprefix(" "))
            elif not line:
                length = len(incomplete)
                if data:
                    yield kind("\n".join(data))
                data = []
        parts.append(incomplete)
