"""Limits on how long a model may give no token, or no verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from lookahead_agent.decoding.accounting import BusyClock
from lookahead_agent.errors import EngineError

T = TypeVar("T")

_NOTHING = 1e-6
"""Seconds. Sums of times are rounded: a timer for less than that may ring before it is seen to be over, for ever."""


async def within(limit: float | None, who: str, work: Coroutine[Any, Any, T]) -> T:
    """Wait for one piece of work."""
    if limit is None:
        return await work
    try:
        async with asyncio.timeout(limit):
            return await work
    except TimeoutError:
        raise _idle(who, limit) from None


def _idle(who: str, limit: float) -> EngineError:
    return EngineError(f"{who} gave no sign of life for {limit:g} s")


class IdleTimeout:
    """A limit in seconds over all requests to a model: their waiting adds up until one of them gets a token.

    There is one timer, and tokens do not move it, so that they cost nothing: it is compared when it rings.
    """

    def __init__(self, limit: float, who: str) -> None:
        self._limit = limit
        self._who = who
        self._loop = asyncio.get_running_loop()
        self._waited = BusyClock(self._loop.time)
        self._waited_at_token = 0.0
        self._waiting: set[asyncio.Task[Any]] = set()
        self._timed_out: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def until(self, token: Coroutine[Any, Any, T]) -> T:
        """Wait for a token."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            with self._waited:
                if self._timer is None:
                    self._set_timer()
                got = await token
        except asyncio.CancelledError:
            if task in self._timed_out and task.uncancel() == 0:
                raise _idle(self._who, self._limit) from None
            raise
        finally:
            self._waiting.discard(task)
            self._timed_out.discard(task)
        self._waited_at_token = self._waited.seconds
        return got

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _left(self) -> float:
        return self._limit - (self._waited.seconds - self._waited_at_token)

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(max(0.0, self._left()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        if self._left() > _NOTHING:
            self._set_timer()
            return
        for task in self._waiting:
            self._timed_out.add(task)
            task.cancel()
