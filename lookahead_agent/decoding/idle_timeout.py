"""A limit on how long a model may say nothing, which costs nothing while it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from lookahead_agent.decoding.accounting import BusyClock
from lookahead_agent.errors import EngineError

T = TypeVar("T")

_NOTHING = 1e-6
"""Seconds. Sums of times are rounded: a timer for less than that may ring before it is seen to be over, for ever."""


class IdleTimeout:
    """Listens to a model, over all requests to it: their silences add up until it says something.

    There is one timer, and words do not move it: when it rings, it is seen how long the silence is by then.

    Args:
        limit: Seconds of being waited for without a word.
        who: Whose silence it is, for the error.
    """

    def __init__(self, limit: float, who: str) -> None:
        self._limit = limit
        self._who = who
        self._loop = asyncio.get_running_loop()
        self._waited = BusyClock(self._loop.time)
        self._heard = 0.0  # how long it had been waited for when it last said something
        self._listening: set[asyncio.Task[Any]] = set()
        self._given_up: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def until(self, word: Coroutine[Any, Any, T]) -> T:
        """Wait for a word.

        Raises:
            EngineError: The silence has lasted too long.
        """
        task = asyncio.current_task()
        assert task is not None
        self._listening.add(task)
        try:
            with self._waited:
                if self._timer is None:
                    self._set_timer()
                said = await word
        except asyncio.CancelledError:
            if task in self._given_up and task.uncancel() == 0:
                raise EngineError(f"{self._who} gave no sign of life for {self._limit:g} s") from None
            raise
        finally:
            self._listening.discard(task)
            self._given_up.discard(task)
        self._heard = self._waited.seconds
        return said

    def close(self) -> None:
        """Listen no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _left(self) -> float:
        return self._limit - (self._waited.seconds - self._heard)

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(max(0.0, self._left()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        if not self._listening:
            return
        if self._left() > _NOTHING:
            self._set_timer()
            return
        for task in self._listening:
            self._given_up.add(task)
            task.cancel()
