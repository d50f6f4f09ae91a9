"""A server on scripted engines, on a port of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import uvicorn

from lookahead_agent import ChatLookahead
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.app import create_app
from lookahead_agent.server.uvicorn_server import ServerConfig
from lookahead_agent.server.writer import ReplyWriter


@contextmanager
def serving(llm: ChatLookahead, **settings: object) -> Iterator[tuple[str, ReplyWriter]]:
    """Serve a chat model; gives the address and what writes the replies."""
    limits = ServerSettings.model_validate(settings)
    app = create_app(llm, limits)
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(ServerConfig(app, limits, log_level="error"))
        ready = threading.Event()
        started = server.startup

        async def startup(sockets: list[socket.socket] | None = None) -> None:
            await started(sockets)
            ready.set()

        server.startup = startup  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert ready.wait(30)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.writer
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()
