"""Runs the application on uvicorn, with limits on the number of connections and the duration of requests.

Granian 2.8 bounds heads, and the time until one has arrived. It has no time-out for bodies or for clients that do not
read, and does not close the connection that waits longest. An application cannot see a Unix socket's peer there.
"""

import asyncio
import logging
import math
import resource
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.generation.server_backend import peer
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.app import create_app
from lookahead_agent.server.start import EngineStart
from lookahead_agent.system.progress import Progress

logger = logging.getLogger(__name__)

_CHUNK = 16 << 10
_MAX_HEAD = 32 << 10  # Bytes of request line and headers above which a request is refused, give or take a chunk
_IDLE_SECONDS = 15
"""Keep-alive timeout: longer than the 5 seconds of httpx, and so of OpenAI's client, so that clients close first."""
_UNREAD_SECONDS = 60.0  # Seconds until a connection whose client does not read its reply is aborted
_FAREWELL_SECONDS = 2  # Seconds after the grace period until connections whose clients do not read are aborted
_BACKLOG = 128  # Connections that asyncio accepts in one go, before any is counted
_QUIET_SECONDS = 60.0  # Seconds between log lines of one kind: clients could cause thousands


class _OncePerMinute(logging.Filter):
    """Rate-limits log lines that any client can cause: one line of each kind per minute passes."""

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
    """Configures uvicorn for hostile clients; `options` are passed on to uvicorn."""

    def __init__(self, app: Starlette, settings: ServerSettings, **options: Any) -> None:
        self.grace: float | None = options.pop("timeout_graceful_shutdown", None)
        super().__init__(
            app,
            # Replies end themselves after the grace period, with an error for their clients.
            timeout_graceful_shutdown=None if self.grace is None else math.ceil(self.grace) + _FAREWELL_SECONDS,
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
        self.end_replies: Callable[[], None] = app.state.writer.end_replies
        # Connections without a complete request, in the order in which they began to wait.
        self.incomplete: OrderedDict[_BoundedProtocol, None] = OrderedDict()
        self.shutting_down = False  # Whether the server shuts down: new connections are aborted
        once = _OncePerMinute()
        for name in ("uvicorn.error", "asyncio", logger.name):
            log = logging.getLogger(name)
            log.filters = [existing for existing in log.filters if not isinstance(existing, _OncePerMinute)]
            log.addFilter(once)


class BoundedServer(uvicorn.Server):
    """A uvicorn server that also shuts down while clients connect."""

    config: ServerConfig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Abort new connections, and let running requests finish; replies end with an error after the grace period."""
        self.config.shutting_down = True
        loop, grace = asyncio.get_running_loop(), self.config.grace
        end = loop.call_later(grace, self.config.end_replies) if grace is not None else None
        await super().shutdown(sockets)
        if end is not None:
            end.cancel()


def run_server(
    llm: ChatLookahead,
    settings: ServerSettings,
    listener: socket.socket,
    grace: int,
    *,
    progress: Progress | None = None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve a chat model until SIGTERM, SIGINT or SIGHUP; running replies then have `grace` seconds to finish.

    The server answers at once. It starts the engines, and calls `on_ready` when they run; raises the error of a start.
    """
    errors: list[Exception] = []

    def end_start(error: Exception | None) -> None:
        if error is not None:
            errors.append(error)
            server.should_exit = True
        elif on_ready is not None:
            on_ready()

    app = create_app(llm, settings, EngineStart(llm, end_start, progress))
    # uvicorn's log records go to the root handler, which removes terminal escape sequences.
    options: dict[str, Any] = {"log_level": "warning", "log_config": None, "timeout_graceful_shutdown": grace}
    server = BoundedServer(ServerConfig(app, settings, **options))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        server.run([listener])
    except KeyboardInterrupt:  # uvicorn raises the signal again after its graceful shutdown
        return
    if errors:
        raise errors[0]


def most_connections(settings: ServerSettings) -> int:
    """Maximum number of connections, at most a third of the file descriptors: closing connections still hold some."""
    return min(settings.connections, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3))


class _BoundedProtocol(H11Protocol):
    """A connection with timeouts: for a complete request to arrive, and for the client to read the reply."""

    config: ServerConfig
    _deadline: asyncio.TimerHandle | None
    _unread_deadline: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Above the limit, the connection that has waited longest for a request is closed.
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            # asyncio sets it only for IPPROTO_TCP sockets. Without it, a body waits 40 ms for the ACK of its head.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif not peer(connection)[1]:
            logger.warning("Closed a connection of another user's process")
            transport.abort()
        self._deadline = self._unread_deadline = None
        if self.config.shutting_down:
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
        # The data is passed on in chunks, so that h11 also refuses a long head that arrives at once.
        for start in range(0, len(data), _CHUNK):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + _CHUNK])
        self._update_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_deadline()

    def shutdown(self) -> None:
        # A running reply is finished first; a connection with an incomplete request is aborted.
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
        """Whether a complete request has arrived whose response is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def abort(self, reason: str) -> None:
        logger.warning("Closed a connection, and may close others without a word: %s", reason)
        self.config.incomplete.pop(self, None)
        self.transport.abort()

    def _update_deadline(self) -> None:
        if self.transport.is_closing() or self.has_request:
            self._clear_deadline()
            self.config.incomplete.pop(self, None)
            if self.has_request and len(self.conn.trailing_data[0]) > _MAX_HEAD:
                self.abort("requests that follow one without its response")
            elif self.has_request:
                # uvicorn would stop reading at a request that follows, and miss that the client hangs up.
                self.flow.resume_reading()
            return
        self.config.incomplete[self] = None
        answered = self.cycle is not None and self.cycle.response_complete
        is_idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if answered and is_idle and self.timeout_keep_alive_task is not None:
            self._clear_deadline()  # uvicorn's keep-alive timeout closes an idle connection
        elif self._deadline is None:
            # `_deadline_passed` waits once more, so that the application can respond to a late body.
            self._deadline = self.loop.call_later(self.config.settings.request_timeout, self._deadline_passed, False)

    def _deadline_passed(self, was_extended: bool) -> None:
        if not was_extended and self.cycle is not None and not self.cycle.response_complete:
            self._deadline = self.loop.call_later(self.config.settings.request_timeout, self._deadline_passed, True)
        else:
            self.abort("requests that do not come to an end")

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
