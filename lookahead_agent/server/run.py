"""Runs the server until a signal ends it."""

from __future__ import annotations

import signal
import socket

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.server.app import create_app
from lookahead_agent.server.connections import BoundedServer, ServerConfig
from lookahead_agent.server.settings import ServerSettings


def run_server(llm: ChatLookahead, settings: ServerSettings, listener: socket.socket, grace: int) -> None:
    """Serve a chat model until SIGTERM, SIGINT or SIGHUP.

    Args:
        llm: The chat model.
        settings: Limits.
        listener: Bound to its address.
        grace: Seconds that running replies have to end.
    """
    config = ServerConfig(
        create_app(llm, settings),
        settings,
        log_level="warning",
        log_config=None,  # its records go where those of this library go, which shows no terminal sequences
        timeout_graceful_shutdown=grace,
    )
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        BoundedServer(config).run([listener])
    except KeyboardInterrupt:  # uvicorn repeats the signal once it has finished what ran
        return
