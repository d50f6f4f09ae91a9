"""Replies as responses: whole, or in server-sent events; a client that goes away stops the work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Send

from lookahead_agent.engines.background import all_of
from lookahead_agent.server.errors import ErrorReplies

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several streams in order of arrival, each with the number of its stream; one that fails ends all."""
    items: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def read(number: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                items.put_nowait((number, item))

    reading = asyncio.ensure_future(all_of([read(number, stream) for number, stream in enumerate(streams)]))
    reading.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


class WholeReply(StreamingResponse):
    """A JSON body that takes long to make.

    Args:
        body: Makes it; stopped when the client goes away.
    """

    media_type = "application/json"

    def __init__(self, body: Awaitable[dict[str, Any]]) -> None:
        super().__init__([])
        self._body = body

    async def stream_response(self, send: Send) -> None:
        """Send the body; what fails before that has a status of its own."""
        content = json.dumps(await self._body).encode()
        self.headers["content-length"] = str(len(content))
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": content, "more_body": False})


class EventStream(StreamingResponse):
    """Server-sent events, ended by `[DONE]`; an error before the first one has a status of its own.

    Args:
        events: Objects to send; stopped when the client goes away.
        errors: Makes the last event from a later error.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], errors: ErrorReplies) -> None:
        super().__init__([], headers={"Cache-Control": "no-cache"})
        self._events = events
        self._errors = errors

    async def stream_response(self, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._events) as events:
            self.body_iterator = self._lines(await anext(events), events)
            await super().stream_response(send)

    async def _lines(
        self, event: dict[str, Any], events: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[str, None]:
        yield _line(event)
        try:
            async for event in events:
                yield _line(event)
        except Exception as error:
            yield _line(self._errors.describe(error)[1])
        yield "data: [DONE]\n\n"


def _line(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"
