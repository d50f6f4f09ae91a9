"""Prefixes are read piece by piece while no reply is written, and a reply makes the reading stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.scripted import ScriptedTokenizer
from lookahead_agent.errors import EngineError
from lookahead_agent.runtime.prefix_warmer import PrefixWarmer
from tests.waiting import becomes


class Reader:
    """An engine that notes what it reads, and that waits or fails where it is told to."""

    tokenizer = ScriptedTokenizer()
    context_length = 1000
    healthy = True

    def __init__(self, fails: int | None = None) -> None:
        self.prompts: list[int] = []
        self.drafted: set[bool] = set()
        self.in_flight = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self._fails = fails

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        self.prompts.append(len(prompt_ids))
        self.drafted.add(sampling.drafted)
        self.in_flight += 1
        try:
            if len(prompt_ids) == self._fails:
                raise EngineError("gone")
            await self.goes_on.wait()
            yield Delta((7,), finish_reason="length")
        finally:
            self.in_flight -= 1


async def read(warmer: PrefixWarmer) -> None:
    """Wait until nothing is left to read."""
    await becomes(lambda: warmer.reading is None and not warmer.waiting)


@pytest.mark.asyncio
async def test_a_prefix_is_read_in_pieces() -> None:
    engine, warmer = Reader(), PrefixWarmer(lambda: True, piece=4, idle_seconds=0)
    warmer.add(engine, range(10), drafted=False)
    await read(warmer)
    assert engine.prompts == [5, 9, 10], "blocks, and the token that is read anew"
    assert engine.drafted == {False}


@pytest.mark.asyncio
async def test_what_the_engine_knows_is_not_read_again() -> None:
    engine, other, warmer = Reader(), Reader(), PrefixWarmer(lambda: True, piece=4, idle_seconds=0)
    warmer.known += [(engine, [0, 1, 2, 3, 4, 5, 99]), (other, range(10)), (engine, [])]
    warmer.add(engine, range(10), drafted=True)
    await read(warmer)
    assert engine.prompts == [9, 10]
    warmer.add(engine, range(10), drafted=True)
    await read(warmer)
    assert engine.prompts == [9, 10]


@pytest.mark.asyncio
async def test_nothing_is_read_while_replies_are_written() -> None:
    idle = False
    engine, warmer = Reader(), PrefixWarmer(lambda: idle, piece=4, idle_seconds=0)
    warmer.add(engine, range(10), drafted=True)
    await asyncio.sleep(0)
    assert warmer.reading is None
    idle = True
    warmer.go_on()
    await read(warmer)
    assert engine.prompts == [5, 9, 10]


@pytest.mark.asyncio
async def test_a_reply_stops_the_reading_which_goes_on_where_it_was() -> None:
    engine, warmer = Reader(), PrefixWarmer(lambda: True, piece=4, idle_seconds=0)
    warmer.add(engine, range(10), drafted=True)
    await becomes(lambda: engine.prompts == [5, 9, 10][: len(engine.prompts)] and bool(engine.prompts))
    engine.goes_on.clear()
    before = len(engine.prompts)
    warmer.add(engine, range(100, 120), drafted=True)
    await becomes(lambda: engine.in_flight == 1)
    await warmer.stop()
    assert engine.in_flight == 0, "the request is aborted before the reply begins"
    assert warmer.reading is None
    stopped = engine.prompts[-1]
    engine.goes_on.set()
    warmer.go_on()
    await read(warmer)
    assert engine.prompts[before:].count(stopped) >= 1
    assert engine.prompts[-1] == 20


@pytest.mark.asyncio
async def test_a_failure_leaves_the_others() -> None:
    engine, warmer = Reader(fails=9), PrefixWarmer(lambda: True, piece=4, idle_seconds=0)
    warmer.add(engine, range(12), drafted=True)
    warmer.add(engine, range(50, 57), drafted=True)
    await read(warmer)
    assert engine.prompts == [5, 9, 5, 7]


@pytest.mark.asyncio
async def test_the_latest_prefixes_wait() -> None:
    engine, warmer = Reader(), PrefixWarmer(lambda: False, piece=4, idle_seconds=0)
    for number in range(40):
        warmer.add(engine, [number], drafted=True)
    assert [list(prefix.ids) for prefix in warmer.waiting] == [[number] for number in range(24, 40)]


@pytest.mark.asyncio
async def test_replies_that_follow_at_once_find_nothing_in_their_way() -> None:
    engine, warmer = Reader(), PrefixWarmer(lambda: True, piece=4, idle_seconds=3600)
    warmer.add(engine, range(10), drafted=True)
    for _ in range(3):
        await asyncio.sleep(0)
        await warmer.stop()
        warmer.go_on()
    await warmer.stop()
    assert engine.prompts == []
    assert len(warmer.waiting) == 1
