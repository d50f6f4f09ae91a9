"""Servers on scripted engines, each on its own port or Unix socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from lookahead_agent import ChatLookahead
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.app import create_app
from lookahead_agent.server.daemon import bind_socket, daemon_settings
from lookahead_agent.server.uvicorn_server import BoundedServer, ServerConfig
from lookahead_agent.server.writer import ReplyWriter


@contextmanager
def serving(llm: ChatLookahead, **settings: object) -> Iterator[tuple[str, ReplyWriter]]:
    """Serve a chat model; yields the URL and the `ReplyWriter`."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        with _running(llm, ServerSettings.model_validate(settings), listener) as writer:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", writer


@contextmanager
def serving_private_api(llm: ChatLookahead, digest: str, grace: float = 60.0) -> Iterator[ReplyWriter]:
    """Serve a chat model as `lookahead-agent up` does, for requests with this digest; yields the `ReplyWriter`."""
    with bind_socket() as listener, _running(llm, daemon_settings(digest), listener, grace) as writer:
        yield writer


@contextmanager
def _running(
    llm: ChatLookahead, settings: ServerSettings, listener: socket.socket, grace: float | None = None
) -> Iterator[ReplyWriter]:
    app, options = create_app(llm, settings), dict[str, Any](timeout_graceful_shutdown=grace)
    server = BoundedServer(ServerConfig(app, settings, log_level="error", **options))
    ready = threading.Event()
    original_startup = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await original_startup(sockets)
        ready.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield app.state.writer
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()
