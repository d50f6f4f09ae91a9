"""What a reply of a chat model tells of its engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedTokenizer, reply_script
from lookahead_agent.hardware.choice import Configuration
from lookahead_agent.hardware.reply_speeds import CPUTime, ReplySpeeds
from lookahead_agent.runtime.engine_selection import EngineSetup
from lookahead_agent.runtime.engine_set import EngineSet

CONFIGURATION = Configuration("draft_model", "fp32", "fp32", ((1, 32, 2),))


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ReplySpeeds:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    return ReplySpeeds(["target", "draft"])


class Shared(CPUTime):
    """CPU time of which other programs had a share."""

    others = 0.0

    def share_of_others(self, before: CPUTime) -> float:
        return self.others


def chat(speeds: ReplySpeeds, tokens_per_delta: int, others: float = 0.0, **fields: Any) -> ChatLookahead:
    target = ScriptedEngine(
        ScriptedTokenizer(), reply_script(lambda _: "one two three four " * 20, 0.2), tokens_per_delta=tokens_per_delta
    )
    engine_setup = EngineSetup(
        target_arguments={"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
        speculation_method="draft_model",
        configuration=CONFIGURATION,
        speeds=speeds,
    )
    shared = type("Shared", (Shared,), {"others": others})
    engines = EngineSet(target, engine_setup=engine_setup, cpu_time=shared.now)
    return ChatLookahead(engines=engines, policy="off", **fields)


@pytest.mark.parametrize(("won", "least", "most"), [(1, 0.0, 0.02), (2, 0.6, 0.65), (3, 0.98, 1.0)])
def test_its_pace_and_how_many_guesses_were_right(speeds: ReplySpeeds, won: int, least: float, most: float) -> None:
    llm = chat(speeds, won)
    for _ in range(2):
        llm.invoke("?")
    assert speeds.paces() == {}, "a few replies must agree"
    llm.invoke("?")
    assert 0 < speeds.paces()[CONFIGURATION.name] < 0.1
    right = speeds.acceptance_rate()
    assert right is not None
    assert least <= right <= most


def test_a_short_reply_tells_nothing(speeds: ReplySpeeds) -> None:
    chat(speeds, 2, max_tokens=20).invoke("?")
    assert speeds.paces() == {}
    assert speeds.acceptance_rate() is None


def test_replies_that_were_written_at_once_tell_nothing(speeds: ReplySpeeds) -> None:
    llm = chat(speeds, 2)
    for _ in range(3):
        llm.batch(["?"] * 8)
    assert speeds.paces() == {}
    for _ in range(3):
        llm.invoke("?")
    assert speeds.paces()


@pytest.mark.parametrize(("others", "kept"), [(0.05, True), (0.3, False)])
def test_replies_that_other_programs_slowed_down_tell_nothing(
    speeds: ReplySpeeds, others: float, *, kept: bool
) -> None:
    """A configuration that looked slow beside other work would never be taken again, nor be seen to be fast."""
    llm = chat(speeds, 2, others)
    for _ in range(3):
        llm.invoke("?")
    assert bool(speeds.paces()) is kept
    assert (speeds.acceptance_rate() is not None) is kept


class Drafted(ScriptedEngine):
    """Has read nothing of a prompt before, and notes whether its draft may read it."""

    seen: list[bool]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        self.seen.append(sampling.drafted)
        async for delta in super().generate(prompt_ids, sampling):
            yield replace(delta, cached_tokens=0)


@pytest.mark.parametrize("forced", [True, False])
def test_a_draft_is_left_out_of_long_prompts_with_short_replies(*, forced: bool) -> None:
    target = Drafted(ScriptedTokenizer(), reply_script(lambda _: "yes"))
    target.seen = []
    setup = EngineSetup(speculation_method="draft_model", draft_is_optional=not forced)
    llm = ChatLookahead(engines=EngineSet(target, engine_setup=setup), policy="off")
    modes = [llm.invoke("a long result " * 100).response_metadata["lookahead"]["mode"] for _ in range(8)]
    assert modes == ["sd"] * 4 + (["sd"] if forced else ["off"]) * 4
    assert target.seen == [mode == "sd" for mode in modes]
    assert llm.invoke("a question?" * 3).response_metadata["lookahead"]["mode"] == modes[-1]
