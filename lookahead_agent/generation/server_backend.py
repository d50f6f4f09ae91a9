"""Generates replies on the daemon that `lookahead-agent up` runs for this user, through a Unix socket."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from lookahead_agent import errors
from lookahead_agent.engines.servers import LineTooLongError, events, read_at_most
from lookahead_agent.errors import ConfigurationError, EngineError, LookaheadError
from lookahead_agent.generation.backend import (
    LIVE_EVENTS,
    ChatReply,
    GenerateEvent,
    GenerateRequest,
    TextDelta,
    event_from_json,
    request_to_json,
)
from lookahead_agent.system.files import cache_dir, user_folder

logger = logging.getLogger(__name__)

RUNTIME_DIR_VARIABLE = "LOOKAHEAD_AGENT_RUNTIME_DIR"
ENGINES_HEADER = "X-Lookahead-Engines"
"""Header with the digest of the engines that a request needs; it requests events with the field `lookahead`."""
STATUS_PATH = "/v1/lookahead/status"
WARM_PATH = "/v1/lookahead/warm"
CHAT_PATH = "/v1/chat/completions"
_DAEMON_ENDED = "the server of `lookahead-agent up` ended while it generated the reply: see `lookahead-agent status`"
_TIMEOUT = 20.0  # seconds; the status takes milliseconds, or a few seconds while the system swaps
_CALL_TIMEOUT = 5.0  # seconds that a call waits for the status before engines of its process serve it
_CONNECT_TIMEOUT = 1.0  # seconds
PING_SECONDS = 10.0  # seconds between pings while a reply has no event
_MAX_BYTES = 1 << 16  # bytes of a status or an error; more bytes make it unreadable
_QUIET_TIMEOUT = 6 * PING_SECONDS  # seconds without event or ping after which the daemon has failed


def runtime_dir() -> Path:
    """Return the folder of socket and log: `$LOOKAHEAD_AGENT_RUNTIME_DIR`, in `$XDG_RUNTIME_DIR`, or in the cache."""
    if chosen := os.environ.get(RUNTIME_DIR_VARIABLE):
        return user_folder(lambda: chosen, f"set {RUNTIME_DIR_VARIABLE} to a whole path").absolute()
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "lookahead-agent"
    return cache_dir() / "run"


def socket_path() -> Path:
    """Return the path of the daemon's socket."""
    return runtime_dir() / "server.sock"


def is_private(path: Path) -> bool:
    """Return whether only this user can have created the socket."""
    try:
        folder, entry = path.parent.lstat(), path.lstat()
    except OSError:
        return False
    owned = folder.st_uid == entry.st_uid == os.getuid()
    return owned and stat.S_ISDIR(folder.st_mode) and stat.S_ISSOCK(entry.st_mode) and not folder.st_mode & 0o077


def peer(connection: socket.socket) -> tuple[int, bool]:
    """Return the process id of a Unix socket's peer, and whether it is this user's. If the system hides it, the id is
    0, and the folder's permissions must suffice."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user == os.getuid()


class ServerStatus(BaseModel):
    """The state of a daemon: its process, its engines and its replies."""

    pid: int
    engines: str  # `RuntimeSpec.digest`
    models: str
    reason: str
    context_length: int
    version: str
    seconds: float  # time since the daemon started
    replies: int  # number of replies finished since then
    running: int


def _client(timeout: float | None, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    # `verify=False`: a Unix socket has no TLS, and loading certificates takes longer than a request.
    transport = transport or httpx.AsyncHTTPTransport(uds=str(socket_path()), verify=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=timeout, trust_env=False)


def _find_listener() -> int | None:
    """Return the id of this user's process that listens on the socket, 0 if the system hides it; None if none does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_TIMEOUT)
        try:
            connection.connect(str(socket_path()))
            pid, is_own = peer(connection)
        except OSError as error:
            logger.info("nobody answers at %s: %s", socket_path(), error)
            return None
    return pid if is_own else None


async def server_status(seconds: float = _TIMEOUT) -> ServerStatus | None:
    """Return the status of this user's daemon, or None without a daemon.

    Raises:
        UnusableServerError: It has not answered within this time, or is of another version.
    """
    if not is_private(socket_path()):
        return None
    pid = 0
    try:
        async with asyncio.timeout(seconds), _client(seconds) as client:
            try:
                pid, content = await _get_status(client)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):  # is anybody still there?
                pid, content = await _get_status(client)
        status = ServerStatus.model_validate_json(content)
    except (httpx.TimeoutException, TimeoutError):
        raise _silent(await asyncio.to_thread(_find_listener), seconds) from None
    except httpx.TransportError as error:
        logger.info("nobody answers at %s: %s", socket_path(), error)
        return None
    except PermissionError:
        return None
    except (httpx.HTTPError, ValidationError) as error:
        raise UnusableServerError(
            f"process {pid or 'unknown'} at {socket_path()} is not a server of this version: "
            f"`kill {pid or 'PID'}` ends it"
        ) from error
    # Containers that share the socket have different process ids for the same process.
    return status.model_copy(update={"pid": pid}) if pid else status


async def _get_status(client: httpx.AsyncClient) -> tuple[int, bytes]:
    """Return the id of the daemon's process and its status; raises PermissionError if it is another user's."""
    async with client.stream("GET", STATUS_PATH) as response:
        pid, is_own = peer(response.extensions["network_stream"].get_extra_info("socket"))
        if not is_own:
            raise PermissionError
        return pid, b"" if response.is_error else await read_at_most(response, _MAX_BYTES)


class UnusableServerError(EngineError):
    """A server runs at the socket that does not answer, or is of another version."""


def _silent(pid: int | None, seconds: float) -> UnusableServerError:
    return UnusableServerError(
        f"the server of `lookahead-agent up` (process {pid or 'unknown'}) has not answered for {seconds:g} s: "
        f"`kill -9 {pid or 'PID'}` ends it and its engines"
    )


async def find_server(digest: str, seconds: float = _CALL_TIMEOUT) -> ServerBackend | None:
    """Return a backend on this user's daemon if its engines have this digest, else None.

    A daemon that does not answer in this time, or is of another version, counts as absent:
    engines of this process serve the call.
    """
    try:
        status = await server_status(seconds)
    except UnusableServerError as error:
        logger.warning("engines of this process generate the reply: %s", error)
        return None
    if status is None:
        return None
    if status.engines != digest:
        logger.warning("the daemon runs other models (%s); starting engines here", status.models)
        return None
    return ServerBackend(status)


class ServerBackend:
    """Generates replies on this user's daemon; `transport` replaces the socket in tests."""

    def __init__(self, status: ServerStatus, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.status = status
        self._transport = transport
        self._headers = {ENGINES_HEADER: status.engines, "Content-Type": "application/json"}

    async def emit_reply(
        self,
        request: GenerateRequest,
        emit: Callable[[GenerateEvent], None],
        kinds: Collection[type[GenerateEvent]] = LIVE_EVENTS,
    ) -> None:
        """Generate a reply; see `LocalBackend.emit_reply`. It raises the same errors as engines of this process."""
        content, finished = json.dumps({"stream": True, "lookahead": request_to_json(request)}), False
        try:
            async with (
                _client(_QUIET_TIMEOUT, self._transport) as client,
                client.stream("POST", CHAT_PATH, content=content, headers=self._headers) as response,
            ):
                if response.is_error:
                    raise _error_of(await read_at_most(response, _MAX_BYTES), response.status_code)
                async for data in events(response.aiter_bytes()):
                    for event in _parse_chunk(data) if data != "[DONE]" else ():
                        finished = isinstance(event, ChatReply)
                        if finished or type(event) in kinds:
                            emit(event)
        except httpx.TimeoutException as error:
            raise _silent(self.status.pid, _QUIET_TIMEOUT) from error
        except httpx.HTTPError as error:
            raise EngineError(_DAEMON_ENDED) from error
        except LineTooLongError as error:
            raise EngineError(f"the server of `lookahead-agent up` sent {error}") from error
        if not finished:
            raise EngineError(_DAEMON_ENDED)

    async def warm(self, request: GenerateRequest) -> None:
        """Queue a request's prompt for prefill by the daemon's engines while they are idle."""
        try:
            async with _client(_TIMEOUT, self._transport) as client:
                content = json.dumps({"lookahead": request_to_json(request)})
                (await client.post(WARM_PATH, content=content, headers=self._headers)).raise_for_status()
        except (ConfigurationError, httpx.HTTPError) as error:  # replies work without it
            logger.debug("a prompt is not read ahead: %s", error)


def _parse_chunk(data: str) -> list[GenerateEvent]:
    """Parse a chunk of the stream: text in OpenAI's format; steps and the reply in the field `lookahead`."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise _error_from_json(chunk)
        parsed: list[GenerateEvent] = []
        for delta in (choice["delta"] for choice in chunk["choices"]):
            parsed += [
                TextDelta("thinking", text)
                for text in [delta.get("reasoning") or delta.get("reasoning_content")]
                if text
            ]
            parsed += [TextDelta("answer", text) for text in [delta.get("content")] if text]
        if (event := chunk.get("lookahead")) is not None:
            parsed.append(event_from_json(event))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"the server of `lookahead-agent up` sent no event of this version: {error!r}") from error
    return parsed


def _error_of(content: bytes, status: int) -> LookaheadError:
    try:
        return _error_from_json(json.loads(content))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return EngineError(f"the server of `lookahead-agent up` answered with status {status}, and no error")


def _error_from_json(body: Mapping[str, Any]) -> LookaheadError:
    details = body.get("lookahead") or {}
    kind = getattr(errors, str(details.get("type")), EngineError)
    is_known = isinstance(kind, type) and issubclass(kind, LookaheadError)
    return (kind if is_known else EngineError)(details.get("text") or body["error"]["message"])
