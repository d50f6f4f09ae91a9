"""Server-sent events of a reply, or of several at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lookahead_agent.server.errors import ErrorReply, error_body

T = TypeVar("T")


class _End:
    """Follows the last item of one of several streams."""


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several streams as they come, each with the number of its stream; one that fails ends all."""
    items: asyncio.Queue[tuple[int, T | _End | Exception]] = asyncio.Queue()

    async def read(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    items.put_nowait((number, item))
        except Exception as error:
            items.put_nowait((number, error))
        else:
            items.put_nowait((number, _End()))

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            number, item = await items.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, _End):
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream(Response):
    """A reply in server-sent events, ended by `[DONE]`.

    Args:
        events: Objects to send; closed as soon as the client has gone.
        on_failure: Told the status of a failure after the first event, which ends the stream with an error event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], on_failure: Callable[[int], None]) -> None:
        self._events = events
        self._on_failure = on_failure
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache"})
        del self.headers["content-length"]

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Headers without a length, which nobody knows yet."""
        self.body = b""
        super().init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client has gone."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        tasks = [asyncio.create_task(self._send_events(send)), asyncio.create_task(disconnected(receive))]
        try:
            # A client that goes while nothing is sent is noticed too.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()

    async def _send_events(self, send: Send) -> None:
        try:
            async for event in self._events:
                await self._send_data(send, json.dumps(event))
        except Exception as error:
            status, body = error_body(error)
            self._on_failure(status)
            await self._send_data(send, json.dumps(ErrorReply(error=body).model_dump()))
        await self._send_data(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send_data(send: Send, data: str) -> None:
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def begun(events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same events, the first of which has come: what fails before it still has a status of its own."""
    first = await anext(events)

    async def rest() -> AsyncGenerator[T, None]:
        async with aclosing(events):
            yield first
            async for event in events:
                yield event

    return rest()
