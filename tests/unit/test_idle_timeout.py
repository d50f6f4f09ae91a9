"""The limit on how long a model may say nothing."""

from __future__ import annotations

import asyncio
import random

import pytest

from lookahead_agent.decoding.idle_timeout import IdleTimeout
from lookahead_agent.errors import EngineError
from tests.virtual_time import run_in_virtual_time


def test_a_silence_ends_however_times_are_rounded() -> None:
    """In virtual time a timer that rings before its time is seen to be over would ring for ever."""
    draw = random.Random(1)

    async def speak_and_be_silent(words: list[float], limit: float) -> None:
        idle_timeout = IdleTimeout(limit, "the draft")
        try:
            for seconds in words:
                await idle_timeout.until(asyncio.sleep(seconds))
                await asyncio.sleep(draw.random())
            with pytest.raises(EngineError, match="the draft gave no sign of life"):
                await idle_timeout.until(asyncio.sleep(10 * limit))
        finally:
            idle_timeout.close()

    for _ in range(500):
        limit = draw.uniform(0.5, 30)
        words = [draw.random() * limit for _ in range(5)]
        run_in_virtual_time(speak_and_be_silent(words, limit))
