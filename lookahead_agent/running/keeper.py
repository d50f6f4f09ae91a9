"""The process that keeps engines running, for all of this user's programs."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from lookahead_agent import __version__
from lookahead_agent.errors import LookaheadError
from lookahead_agent.generation.backend import Backend, event_to_json, request_from_json
from lookahead_agent.running.address import same_user
from lookahead_agent.running.frames import Frame, receive, send
from lookahead_agent.running.wire import error_to_frame

logger = logging.getLogger(__name__)


class Keeper:
    """Answers orders for replies at a socket.

    Args:
        backend: Generates the replies.
        engines: Which engines there are: `RuntimeSpec.digest`. Orders for others are refused.
        about: What `status` says of them.
        grace: Seconds that running replies have to end once it is to stop.
    """

    def __init__(
        self, backend: Backend, engines: str, about: Callable[[], dict[str, Any]], *, grace: float = 60.0
    ) -> None:
        self._backend = backend
        self._engines = engines
        self._about = about
        self._grace = grace
        self._started = time.monotonic()
        self._replies = 0
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Take no more orders, and end once the running replies have; from within the event loop."""
        self._stopping.set()

    async def serve(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        """Answer orders until `stop`.

        Args:
            listener: Where they come: see `address.listening`.
            ready: Called once they are answered.
        """
        server = await asyncio.start_unix_server(self._serve_one, sock=listener)
        try:
            ready()
            await self._stopping.wait()
        finally:
            server.close()
        if self._running:
            await asyncio.wait(self._running, timeout=self._grace)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not same_user(writer.get_extra_info("socket")):
                logger.warning("a process of another user was turned away")
                return
            frame = await receive(reader)
            if frame is not None:
                await self._carry_out(frame, reader, writer)
            await writer.drain()
        except (LookaheadError, ConnectionError) as error:
            logger.info("a connection ended: %s", error)
        finally:
            writer.close()

    async def _carry_out(self, frame: Frame, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match frame.get("order"):
            case "status":
                send(writer, self._status())
            case "stop":
                self.stop()
                send(writer, self._status())
            case "reply" if frame.get("engines") == self._engines and not self._stopping.is_set():
                await self._reply(frame, reader, writer)
            case "reply":
                send(writer, {"refused": self._about()["models"]})
            case other:
                send(writer, {"refused": f"the order {other!r}"})

    def _status(self) -> Frame:
        return {
            **self._about(),
            "version": __version__,
            "pid": os.getpid(),
            "seconds": time.monotonic() - self._started,
            "replies": self._replies,
            "running": len(self._running),
        }

    async def _reply(self, frame: Frame, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = request_from_json(frame["request"])
        except (KeyError, ValueError) as error:
            send(writer, {"error": {"type": "EngineError", "text": f"an order that cannot be read: {error!r}"}})
            return

        async def generate() -> None:
            async with aclosing(self._backend.generate(request)) as events:
                async for event in events:
                    send(writer, event_to_json(event))

        writing = asyncio.ensure_future(generate())
        self._running.add(writing)
        try:
            async with _cancelled_when_gone(reader, writing):
                await writing
            self._replies += 1
        except LookaheadError as error:
            send(writer, error_to_frame(error))
        except asyncio.CancelledError:
            if not writing.cancelled():
                raise
            send(writer, {"error": {"type": "EngineError", "text": "the running engines were stopped"}})
        finally:
            self._running.discard(writing)


@asynccontextmanager
async def _cancelled_when_gone(reader: asyncio.StreamReader, writing: asyncio.Task[None]) -> AsyncIterator[None]:
    """Cancel the work when whoever ordered it closes the connection."""

    async def wait_for_the_end() -> None:
        try:
            await reader.read(1)
        except ConnectionError as error:
            logger.debug("a connection broke: %s", error)
        writing.cancel()

    gone = asyncio.ensure_future(wait_for_the_end())
    try:
        yield
    finally:
        gone.cancel()
        await asyncio.wait([gone])
