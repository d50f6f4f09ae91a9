"""Who may come in: the length of bodies, the key, and how many at once."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookahead_agent.server.errors import RefusedError


class BodyLimit:
    """Middleware that refuses bodies that are too long, also those that do not say how long they are.

    Args:
        app: What comes after it.
        limit: Longest body in bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise HTTPException(413, f"the body is longer than {self._limit} bytes")
            return message

        await self._app(scope, counted, send)


def check_key(given: str | None, expected: str | None) -> None:
    """Check the `Authorization` header of a request.

    Raises:
        RefusedError: The key is wrong or missing.
    """
    if expected is None:
        return
    scheme, _, key = (given or "").partition(" ")
    right = secrets.compare_digest(key.strip().encode(), expected.encode())
    if scheme.lower() != "bearer" or not right:
        raise RefusedError(401, "the API key is wrong or missing: send it as 'Authorization: Bearer …'")


class Admission:
    """Lets so many replies be written at once, so many wait, and refuses the rest.

    Args:
        concurrent: Replies at once.
        queue: Replies that may wait.
    """

    def __init__(self, concurrent: int, queue: int) -> None:
        self._concurrent = concurrent
        self._queue = queue
        self._slots = asyncio.Semaphore(concurrent)
        self._seconds = 1.0
        self.running = 0
        """Replies that are being written."""
        self.waiting = 0
        """Replies that wait."""

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for one's turn, and have it while the context lasts.

        Raises:
            RefusedError: Too many wait already (429).
        """
        if self.running >= self._concurrent and self.waiting >= self._queue:
            raise RefusedError(
                429,
                f"{self.running} replies are being written and {self.waiting} wait: try again later",
                code="queue_full",
                retry_after=math.ceil(self._seconds * (self.waiting + 1) / self._concurrent),
            )
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()
            # How long a reply takes lately, for those who ask when to come again.
            self._seconds += 0.2 * (time.monotonic() - started - self._seconds)
