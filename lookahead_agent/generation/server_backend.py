"""Replies from the server that `lookahead-agent up` runs for this user, on a Unix socket."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import stat
import struct
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from lookahead_agent import errors
from lookahead_agent.engines.servers import events
from lookahead_agent.errors import ConfigurationError, EngineError, LookaheadError
from lookahead_agent.generation.backend import (
    ChatReply,
    GenerateEvent,
    GenerateRequest,
    TextDelta,
    event_from_json,
    request_to_json,
)
from lookahead_agent.models.cache import cache_dir, user_folder

logger = logging.getLogger(__name__)

RUNTIME_DIR_VARIABLE = "LOOKAHEAD_AGENT_RUNTIME_DIR"
ENGINES_HEADER = "X-Lookahead-Engines"
"""Header with the digest of the engines that a request is for. It asks for events with the field `lookahead`."""
STATUS_PATH = "/v1/lookahead/status"
WARM_PATH = "/v1/lookahead/warm"
CHAT_PATH = "/v1/chat/completions"
_ENDED = "the server of `lookahead-agent up` ended while it generated the reply: see `lookahead-agent status`"
_PATIENCE = 20.0  # seconds: a server tells its status in milliseconds, and in a few seconds where the system swaps


def runtime_dir() -> Path:
    """Folder of socket and log: `$LOOKAHEAD_AGENT_RUNTIME_DIR`, else one of this login's or this user's."""
    if chosen := os.environ.get(RUNTIME_DIR_VARIABLE):
        return user_folder(lambda: chosen, f"set {RUNTIME_DIR_VARIABLE} to a whole path").absolute()
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "lookahead-agent"
    return cache_dir() / "run"


def socket_path() -> Path:
    """The server's socket."""
    return runtime_dir() / "server.sock"


def is_private(path: Path) -> bool:
    """Whether nobody but this user can have put a socket there."""
    try:
        folder, itself = path.parent.lstat(), path.lstat()
    except OSError:
        return False
    own = folder.st_uid == itself.st_uid == os.getuid()
    return own and stat.S_ISDIR(folder.st_mode) and stat.S_ISSOCK(itself.st_mode) and not folder.st_mode & 0o077


def peer(connection: socket.socket) -> tuple[int, bool]:
    """The process at the other end of a Unix socket, and whether it is this user's; 0 where the system does not tell:
    the folder's permissions have to do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, True
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", told)
    return process, user == os.getuid()


class ServerStatus(BaseModel):
    """The state of a server: its process, its engines and its replies."""

    pid: int
    engines: str  # their digest, `RuntimeSpec.digest`
    models: str
    reason: str
    context_length: int
    version: str
    seconds: float  # since it started
    replies: int  # that it has finished since then
    running: int


def _client(timeout: float | None, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    # `verify`: a Unix socket has no TLS, and reading certificates takes longer than a request.
    transport = transport or httpx.AsyncHTTPTransport(uds=str(socket_path()), verify=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=timeout, trust_env=False)


def _listening_process() -> int | None:
    """The process that listens at the socket, 0 where the system does not tell; None: no process of this user does."""
    path = socket_path()
    if not is_private(path):
        return None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE)
        try:
            connection.connect(str(path))
            pid, own = peer(connection)
        except OSError as error:
            logger.info("nobody answers at %s: %s", path, error)
            return None
    return pid if own else None


async def server_status(patience: float = _PATIENCE) -> ServerStatus | None:
    """The status of this user's server, None if there is none; EngineError after `patience` seconds."""
    pid = await asyncio.to_thread(_listening_process)
    if pid is None:
        return None
    try:
        async with _client(patience) as client:
            answer = await client.get(STATUS_PATH)
        status = ServerStatus.model_validate_json(answer.raise_for_status().content)
    except httpx.TimeoutException:
        raise EngineError(
            f"the server of `lookahead-agent up` (process {pid or 'unknown'}) has not answered for {patience:g} s: "
            f"`kill -9 {pid or 'PID'}` ends it and its engines"
        ) from None
    except httpx.TransportError as error:
        logger.info("the server at %s ends just now: %s", socket_path(), error)
        return None
    except (httpx.HTTPStatusError, ValidationError) as error:
        raise EngineError(
            f"process {pid or 'unknown'} at {socket_path()} is no server of this version: `kill {pid or 'PID'}` ends it"
        ) from error
    # Where the socket is shared between containers, a process has another number in each.
    return status.model_copy(update={"pid": pid}) if pid else status


async def find_server(digest: str) -> ServerBackend | None:
    """This user's server with the engines of this digest; None if there is none."""
    status = await server_status()
    if status is None:
        return None
    if status.engines != digest:
        logger.warning(
            "the engines that run in the background are not these, but others are started: %s", status.models
        )
        return None
    return ServerBackend(status)


class ServerBackend:
    """Has this user's server generate replies; `transport` replaces the socket, for tests."""

    def __init__(self, status: ServerStatus, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.status = status
        self._transport = transport
        self._headers = {ENGINES_HEADER: status.engines, "Content-Type": "application/json"}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Generate a reply; see `LocalBackend.generate`. Errors are those of the same engines in this process."""
        content, finished = json.dumps({"stream": True, "lookahead": request_to_json(request)}), False
        try:
            async with (
                _client(None, self._transport) as client,
                client.stream("POST", CHAT_PATH, content=content, headers=self._headers) as response,
            ):
                if response.is_error:
                    raise _error(json.loads(await response.aread()))
                async for data in events(response.aiter_bytes()):
                    for event in _events(data) if data != "[DONE]" else ():
                        finished = isinstance(event, ChatReply)
                        yield event
        except httpx.TransportError as error:
            raise EngineError(_ENDED) from error
        if not finished:
            raise EngineError(_ENDED)

    async def warm(self, request: GenerateRequest) -> None:
        """Have the server's engines read a request's prompt when no reply is written."""
        try:
            async with _client(_PATIENCE, self._transport) as client:
                content = json.dumps({"lookahead": request_to_json(request)})
                (await client.post(WARM_PATH, content=content, headers=self._headers)).raise_for_status()
        except (ConfigurationError, httpx.HTTPError) as error:  # replies do without it
            logger.debug("a prompt is not read ahead: %s", error)


def _events(data: str) -> list[GenerateEvent]:
    """The events in a chunk of the stream: text in OpenAI's form; steps and the reply in the field `lookahead`."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise _error(chunk)
        found: list[GenerateEvent] = []
        for delta in (choice["delta"] for choice in chunk["choices"]):
            found += [TextDelta("thinking", text) for text in [delta.get("reasoning_content")] if text]
            found += [TextDelta("answer", text) for text in [delta.get("content")] if text]
        if (event := chunk.get("lookahead")) is not None:
            found.append(event_from_json(event))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"the server of `lookahead-agent up` sent no event of this version: {error!r}") from error
    return found


def _error(answer: Mapping[str, Any]) -> LookaheadError:
    told = answer.get("lookahead") or {}
    kind = getattr(errors, str(told.get("type")), EngineError)
    known = isinstance(kind, type) and issubclass(kind, LookaheadError)
    return (kind if known else EngineError)(told.get("text") or answer["error"]["message"])
