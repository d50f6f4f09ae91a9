"""Speeds and acceptance rates that a chat model records from its replies."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.decoding.accounting import PromptCounts, ReplyReport
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedTokenizer, reply_script
from lookahead_agent.errors import EngineError
from lookahead_agent.modes.chooser import ModeChooser
from lookahead_agent.modes.record import CPUTime, PaceRecord, Series
from lookahead_agent.modes.table import Configuration
from lookahead_agent.runtime.engine_selection import EngineSetup
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.system import background

CONFIGURATION = Configuration("draft_model", "fp32", "fp32", ((1, 32, 2),))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PaceRecord:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    return PaceRecord(["target", "draft"])


class SharedCPUTime(CPUTime):
    """CPU time of which other programs used a fixed share."""

    others = 0.0

    def share_of_others(self, before: CPUTime) -> float:
        return self.others


def chat(
    record: PaceRecord,
    tokens_per_delta: int,
    others: float = 0.0,
    engine: type[ScriptedEngine] = ScriptedEngine,
    **fields: Any,
) -> ChatLookahead:
    target = engine(
        ScriptedTokenizer(), reply_script(lambda _: "one two three four " * 20, 0.2), tokens_per_delta=tokens_per_delta
    )
    engine_setup = EngineSetup(
        target_arguments={"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
        speculation_method="draft_model",
        configuration=CONFIGURATION,
        on_cpu=True,
        modes=ModeChooser(record, configuration=CONFIGURATION.name),
    )
    shared = type("Shared", (SharedCPUTime,), {"others": others})
    engines = EngineSet(target, engine_setup=engine_setup, cpu_time=shared.now)
    return ChatLookahead(engines=engines, policy="off", **fields)


def test_a_failed_reply_leaves_no_error_of_the_cpu_time(record: PaceRecord, caplog: pytest.LogCaptureFixture) -> None:
    class FailingEngine(ScriptedEngine):
        def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
            raise EngineError("out of memory")

    def read_cpu_time() -> CPUTime:
        raise RuntimeError("no /proc")

    llm = chat(record, 1, engine=FailingEngine)
    assert llm.engines is not None
    llm.engines.cpu_time = read_cpu_time
    with pytest.raises(EngineError, match="out of memory"):
        llm.invoke("?")
    background.run(asyncio.sleep(0.05))
    gc.collect()
    background.run(asyncio.sleep(0))
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(("tokens", "low", "high"), [(1, 0.0, 0.02), (2, 0.6, 0.65), (3, 0.98, 1.0)])
def test_replies_record_pace_and_acceptance_rate(record: PaceRecord, tokens: int, low: float, high: float) -> None:
    llm = chat(record, tokens)
    for _ in range(2):
        llm.invoke("?")
    assert ModeChooser(record).paces() == {}, "two replies are too few"
    llm.invoke("?")
    chooser = ModeChooser(record)
    assert 0 < chooser.paces()[CONFIGURATION.name] < 0.1
    assert low <= chooser.acceptance_rate <= high
    assert Series(CONFIGURATION.name, "sd", node="|off") in record.read(), "the node has its own"
    assert "(all)" in llm.explain()
    assert "|off" in llm.explain()


class CountingEngine(ScriptedEngine):
    """Proposes ten draft tokens for each request, of which the target accepts eight."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        async for delta in super().generate(prompt_ids, sampling):
            yield replace(delta, proposals=(10, 8)) if delta.finish_reason is not None else delta


def test_figures_of_the_engine_go_before_counted_passes(record: PaceRecord) -> None:
    llm = chat(record, 1, engine=CountingEngine)
    found = [llm.invoke("?").response_metadata["lookahead"] for _ in range(3)]
    assert {(figures["proposed_tokens"], figures["accepted_tokens"]) for figures in found} == {(10, 8)}
    assert ModeChooser(record).acceptance_rate == pytest.approx(0.86, abs=0.001), "1 + 2 · 0.8 tokens per pass"


def test_short_reply_is_not_recorded(record: PaceRecord) -> None:
    llm = chat(record, 2, max_tokens=20)
    llm.invoke("?")
    assert record.read() == {}
    assert llm.explain() == "The caller supplied the engines", "nothing is measured"


def test_paces_of_concurrent_replies_are_not_those_of_replies_alone(record: PaceRecord) -> None:
    llm = chat(record, 2)
    for _ in range(3):
        llm.batch(["?"] * 8)
    assert ModeChooser(record).paces() == {}
    for _ in range(3):
        llm.invoke("?")
    assert ModeChooser(record).paces()


@pytest.mark.parametrize(
    ("before", "after", "load"),
    [(1, 1, "alone"), (1, 2, None), (3, 2, "beside others"), (2, 1, None), (3, 5, None), (5, 3, None)],
)
def test_a_reply_is_learned_from_if_its_load_stayed_the_same(before: int, after: int, load: str | None) -> None:
    """The numbers of replies that are being written as it begins and as it ends."""

    async def learn() -> str:
        engines = EngineSet(ScriptedEngine(ScriptedTokenizer(), reply_script(lambda _: "yes")))
        engines.replies_at_once = before
        start = engines.begin_measurement()
        engines.replies_at_once = after
        engines.replies += max(0, after - before)
        report = ReplyReport(seconds={"prompt": 1.0, "writing": 2.0})
        await engines.learn("node", "sd", report, 101, start)
        return "\n".join(line for line in engines.modes.table() if "node  " in line and "20.0" in line)

    learned = asyncio.run(learn())
    assert (load in learned) if load is not None else learned == ""


@pytest.mark.parametrize(
    ("read", "tokens", "quantities"), [(500, 9, {"prefill"}), (90, 101, {"writing"}), (90, 9, set())]
)
def test_short_replies_to_long_prompts_measure_the_prefill(
    record: PaceRecord, read: int, tokens: int, quantities: set[str]
) -> None:
    async def learn() -> None:
        setup = EngineSetup(modes=ModeChooser(record, configuration="shared_draft"))
        engines = EngineSet(ScriptedEngine(ScriptedTokenizer(), reply_script(lambda _: "yes")), engine_setup=setup)
        engines.replies_at_once = 1
        report = ReplyReport(seconds={"prompt": 1.0, "writing": 2.0}, target_prompt=PromptCounts(600, 600 - read))
        await engines.learn("node", "sd", report, tokens, engines.begin_measurement())

    asyncio.run(learn())
    kept = record.read()
    assert {series.quantity for series in kept if series.node} == quantities
    assert kept.get(Series("shared_draft", "sd", node="node", quantity="prefill"), [0.002]) == [0.002]


@pytest.mark.parametrize(("others", "recorded"), [(0.05, True), (0.3, False)])
def test_replies_slowed_down_by_other_programs_are_not_recorded(
    record: PaceRecord, others: float, *, recorded: bool
) -> None:
    """A configuration slowed down by other work would never be selected again, nor measured anew."""
    chat(record, 2, others).invoke("?")
    assert bool(record.read()) is recorded


class UncachedEngine(ScriptedEngine):
    """An engine without prefix cache hits that records for each request whether its draft may read the prompt."""

    drafted: list[bool]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        self.drafted.append(sampling.drafted)
        async for delta in super().generate(prompt_ids, sampling):
            yield replace(delta, cached_tokens=0)


@pytest.mark.parametrize("forced", [True, False])
def test_optional_draft_is_left_out_for_long_prompts_with_short_replies(*, forced: bool) -> None:
    target = UncachedEngine(ScriptedTokenizer(), reply_script(lambda _: "yes"))
    target.drafted = []
    setup = EngineSetup(speculation_method="draft_model", draft_is_optional=not forced)
    llm = ChatLookahead(engines=EngineSet(target, engine_setup=setup), policy="off")
    modes = [llm.invoke("a long result " * 100).response_metadata["lookahead"]["mode"] for _ in range(8)]
    assert modes == ["sd"] * 4 + (["sd"] if forced else ["off"]) * 4
    assert target.drafted == [mode == "sd" for mode in modes]
    assert llm.invoke("a question?" * 3).response_metadata["lookahead"]["mode"] == modes[-1]
