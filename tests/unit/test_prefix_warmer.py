"""Prefixes are prefilled in pieces while no reply is generated; a reply interrupts the prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.scripted import ScriptedTokenizer
from lookahead_agent.errors import EngineError
from lookahead_agent.runtime.prefix_warmer import PrefixWarmer
from tests.waiting import wait_until


class RecordingEngine:
    """An engine that records its prompts, waits for `unblocked`, and fails at a prompt of `failing_length` tokens."""

    tokenizer = ScriptedTokenizer()
    context_length = 1000
    healthy = True

    def __init__(self, failing_length: int | None = None) -> None:
        self.prompts: list[int] = []
        self.drafted: set[bool] = set()
        self.in_flight = 0
        self.unblocked = asyncio.Event()
        self.unblocked.set()
        self._failing_length = failing_length

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        self.prompts.append(len(prompt_ids))
        self.drafted.add(sampling.drafted)
        self.in_flight += 1
        try:
            if len(prompt_ids) == self._failing_length:
                raise EngineError("gone")
            await self.unblocked.wait()
            yield Delta((7,), finish_reason="length")
        finally:
            self.in_flight -= 1


async def wait_for_prefill(warmer: PrefixWarmer) -> None:
    """Wait until no prefix is left to prefill."""
    await wait_until(lambda: warmer.prefill_task is None and not warmer.waiting)


@pytest.mark.asyncio
async def test_prefix_is_prefilled_in_pieces() -> None:
    engine, warmer = RecordingEngine(), PrefixWarmer(lambda: True, piece=4, idle_seconds=0)
    warmer.add(engine, range(10), drafted=False)
    await wait_for_prefill(warmer)
    assert engine.prompts == [5, 9, 10], "whole blocks, and one token that vLLM recomputes"
    assert engine.drafted == {False}


@pytest.mark.asyncio
async def test_known_tokens_are_not_prefilled_again() -> None:
    engine, other, warmer = RecordingEngine(), RecordingEngine(), PrefixWarmer(lambda: True, piece=4, idle_seconds=0)
    warmer.known += [(engine, [0, 1, 2, 3, 4, 5, 99]), (other, range(10)), (engine, [])]
    warmer.add(engine, range(10), drafted=True)
    await wait_for_prefill(warmer)
    assert engine.prompts == [9, 10]
    warmer.add(engine, range(10), drafted=True)
    await wait_for_prefill(warmer)
    assert engine.prompts == [9, 10]


@pytest.mark.asyncio
async def test_no_prefill_starts_while_replies_are_generated() -> None:
    idle = False
    engine, warmer = RecordingEngine(), PrefixWarmer(lambda: idle, piece=4, idle_seconds=0)
    warmer.add(engine, range(10), drafted=True)
    await asyncio.sleep(0)
    assert warmer.prefill_task is None
    idle = True
    warmer.resume()
    await wait_for_prefill(warmer)
    assert engine.prompts == [5, 9, 10]


@pytest.mark.asyncio
async def test_reply_aborts_the_prefill_which_resumes_afterwards() -> None:
    engine, warmer = RecordingEngine(), PrefixWarmer(lambda: True, piece=4, idle_seconds=0)
    engine.unblocked.clear()
    warmer.add(engine, range(10), drafted=True)
    await wait_until(lambda: engine.prompts == [5])
    engine.unblocked.set()  # releases only the first piece
    engine.unblocked.clear()
    await wait_until(lambda: engine.prompts == [5, 9])
    await warmer.stop()
    assert engine.in_flight == 0, "the prefill is aborted before the reply begins"
    assert warmer.prefill_task is None
    engine.unblocked.set()
    warmer.resume()
    await wait_for_prefill(warmer)
    assert engine.prompts == [5, 9, 9, 10], "the aborted piece is prefilled again, the earlier one is not"


@pytest.mark.asyncio
async def test_failed_prefix_does_not_stop_the_others() -> None:
    engine, warmer = RecordingEngine(failing_length=9), PrefixWarmer(lambda: True, piece=4, idle_seconds=0)
    warmer.add(engine, range(12), drafted=True)
    warmer.add(engine, range(50, 57), drafted=True)
    await wait_for_prefill(warmer)
    assert engine.prompts == [5, 9, 5, 7]


@pytest.mark.asyncio
async def test_only_the_latest_prefixes_are_kept_waiting() -> None:
    engine, warmer = RecordingEngine(), PrefixWarmer(lambda: False, piece=4, idle_seconds=0)
    for number in range(40):
        warmer.add(engine, [number], drafted=True)
    assert [list(prefix.ids) for prefix in warmer.waiting] == [[number] for number in range(24, 40)]


@pytest.mark.asyncio
async def test_no_prefill_starts_between_replies_that_follow_immediately() -> None:
    engine, warmer = RecordingEngine(), PrefixWarmer(lambda: True, piece=4, idle_seconds=3600)
    warmer.add(engine, range(10), drafted=True)
    for _ in range(3):
        await asyncio.sleep(0)
        await warmer.stop()
        warmer.resume()
    await warmer.stop()
    assert engine.prompts == []
    assert len(warmer.waiting) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [RuntimeError("no such block"), asyncio.CancelledError(), SystemExit("bye")])
async def test_any_failure_is_logged_once_and_later_prefixes_are_prefilled(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class FailingEngine(RecordingEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
            raise error
            yield

    engine, warmer = RecordingEngine(), PrefixWarmer(lambda: True, piece=4, idle_seconds=0)
    for _ in range(2):
        warmer.add(FailingEngine(), range(10), drafted=True)
        await wait_for_prefill(warmer)
    warmer.add(engine, range(3), drafted=True)
    await wait_for_prefill(warmer)
    assert engine.prompts == [3]
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "prompts are not read ahead" in warnings[0].getMessage()
