"""Runs the application by uvicorn, with bounds on connections: how many, and how long each may take to ask."""

import asyncio
import logging
import math
import resource
import signal
import socket
import time
from collections import OrderedDict
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.generation.server_backend import peer
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.app import create_app

logger = logging.getLogger(__name__)

_PIECE = 16 << 10
_MAX_HEAD = 32 << 10  # Bytes of a request's line and headers from which no more are waited for, a piece more or less
_IDLE_SECONDS = 15
"""Between two requests: longer than the five seconds of httpx, and so of OpenAI's client, which then closes first."""
_UNREAD_SECONDS = 60.0  # After which a client is given up that does not read its reply
_BACKLOG = 128  # Connections that are accepted in one go, before any is counted
_QUIET_SECONDS = 60.0  # Between two log lines of the same kind, of which clients could cause thousands


class _OncePerMinute(logging.Filter):
    """Lets one log line of a kind pass in a minute, of those that any client can cause."""

    KINDS = ("Invalid HTTP request", "Unsupported upgrade", "No supported WebSocket", "socket.accept()", "Closed")

    def __init__(self) -> None:
        super().__init__()
        self._last = dict.fromkeys(self.KINDS, -math.inf)

    def filter(self, record: logging.LogRecord) -> bool:
        kind = next((kind for kind in self.KINDS if str(record.msg).startswith(kind)), None)
        if kind is None:
            return True
        now = time.monotonic()
        passes = now - self._last[kind] >= _QUIET_SECONDS
        if passes:
            self._last[kind] = now
        return passes


class ServerConfig(uvicorn.Config):
    """Configures uvicorn for clients that may mean no good; `options` are further ones of uvicorn's."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, **options: Any) -> None:
        super().__init__(
            app,
            http=_BoundedProtocol,
            ws="none",
            loop="asyncio",
            h11_max_incomplete_event_size=_MAX_HEAD,
            timeout_keep_alive=_IDLE_SECONDS,
            backlog=max(1, min(_BACKLOG, most_connections(settings) // 2)),
            server_header=False,
            **options,
        )
        self.settings = settings
        # Connections without a whole request, those that wait longest first.
        self.incomplete: OrderedDict[_BoundedProtocol, None] = OrderedDict()
        self.ending = False  # Whether the server ends: what is still being accepted is not waited for
        once = _OncePerMinute()
        for name in ("uvicorn.error", "asyncio", logger.name):
            log = logging.getLogger(name)
            log.filters = [each for each in log.filters if not isinstance(each, _OncePerMinute)]
            log.addFilter(once)


class BoundedServer(uvicorn.Server):
    """Ends also while clients connect."""

    config: ServerConfig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs."""
        self.config.ending = True
        await super().shutdown(sockets)


def run_server(llm: ChatLookahead, settings: ServerSettings, listener: socket.socket, grace: int) -> None:
    """Serve a chat model until SIGTERM, SIGINT or SIGHUP; then running replies have `grace` seconds to end."""
    # Its log records go where those of this library go, which shows no terminal sequences.
    options: dict[str, Any] = {"log_level": "warning", "log_config": None, "timeout_graceful_shutdown": grace}
    config = ServerConfig(create_app(llm, settings), settings, **options)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        BoundedServer(config).run([listener])
    except KeyboardInterrupt:  # uvicorn repeats the signal once it has finished what ran
        return


def most_connections(settings: ServerSettings) -> int:
    """Connections at once: a third of the process's descriptors, for some are being closed while others come."""
    return min(settings.connections, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3))


class _BoundedProtocol(H11Protocol):
    """A connection that is closed when no whole request has come in time, or its reply is not read."""

    config: ServerConfig
    _deadline: asyncio.TimerHandle | None
    _unread_deadline: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Too many connections close that which has waited longest.
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        if connected.family != socket.AF_UNIX:
            # asyncio does so for sockets that name TCP: else a reply's body waits 40 ms for its head's acknowledgement.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif not peer(connected)[1]:
            logger.warning("Closed a connection of another user's process")
            transport.abort()
        self._deadline = self._unread_deadline = None
        if self.config.ending:
            transport.abort()
        self._update_deadline()
        if len(self.connections) > most_connections(self.config.settings):
            oldest = next(iter(self.config.incomplete), self)
            oldest.abort("more connections than the server takes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self.config.incomplete.pop(self, None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # In pieces: a long head is refused also where it comes at once.
        for start in range(0, len(data), _PIECE):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + _PIECE])
        self._update_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_deadline()

    def shutdown(self) -> None:
        # After the reply that is being written; at once, if there is no whole request to reply to.
        if self.has_request or self.cycle is None or self.cycle.response_complete:
            super().shutdown()
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_deadline is None:
            self._unread_deadline = self.loop.call_later(_UNREAD_SECONDS, self.abort, "replies that are not read")

    def resume_writing(self) -> None:
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None
        super().resume_writing()

    @property
    def has_request(self) -> bool:
        """Whether a whole request has come that is not answered."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def abort(self, why: str) -> None:
        logger.warning("Closed a connection, and may close others without a word: %s", why)
        self.config.incomplete.pop(self, None)
        self.transport.abort()

    def _update_deadline(self) -> None:
        if self.transport.is_closing() or self.has_request:
            self._clear_deadline()
            self.config.incomplete.pop(self, None)
            return
        self.config.incomplete[self] = None
        answered = self.cycle is not None and self.cycle.response_complete
        nothing = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if answered and nothing and self.timeout_keep_alive_task is not None:
            self._clear_deadline()  # uvicorn closes the connection if nothing comes of the next request
        elif self._deadline is None:
            # The application answers a request whose body is late; this leaves it the time.
            self._deadline = self.loop.call_later(self.config.settings.request_timeout, self._deadline_passed, False)

    def _deadline_passed(self, again: bool) -> None:
        if not again and self.cycle is not None and not self.cycle.response_complete:
            self._deadline = self.loop.call_later(self.config.settings.request_timeout, self._deadline_passed, True)
        else:
            self.abort("requests that do not come to an end")

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
