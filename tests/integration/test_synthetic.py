"""Synthetic acceptance on real vLLM with a tiny pair."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.cost_model.pair import Pair
from lookahead_agent.cost_model.synthetic import SyntheticSettings, results
from lookahead_agent.cost_model.synthetic_bench import ChanceByPosition, SyntheticBench
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.verifier import StepPair
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import as_policy
from lookahead_agent.system import background
from lookahead_agent.system.progress import LogProgress
from tests.integration.conftest import TINY_ENGINE

SETTINGS = SyntheticSettings(
    modes=("lr",),
    alphas=(0.6,),
    depths=(3,),
    replies=(1, 2),
    step_tokens=6,
    steps=24,
    repeats=1,
)


async def _engines_of(llm: ChatLookahead) -> dict[str, Engine | None]:
    async with llm.backend.engines(as_policy("exact")) as engines:
        return {"target": engines.target, "draft": engines.draft}


def test_drawn_steps_are_accepted_unless_the_draft_is_late(
    tiny: ChatLookahead, tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(
        str(tiny_pair[0]),
        str(tiny_pair[1]),
        dummy_weights=True,
        engine_args=TINY_ENGINE,
        precision=None,
        draft_precision=None,
        progress=LogProgress(),
    )
    # Reuses running engines; the tests of `estimate` cover engines that a pair starts.
    engines = background.run(_engines_of(tiny))
    monkeypatch.setattr(pair, "engine", lambda role, cores, **_: nullcontext(engines[role]))
    bench = SyntheticBench(pair, SETTINGS, tmp_path / "rows.jsonl")
    assert bench.run(LogProgress())
    assert len(bench.rows()) == bench.total == 4
    for row in bench.rows():
        assert row.tokens["target"]["committed"] + row.tokens["draft"]["committed"] == SETTINGS.tokens * row.replies
    speculated = [row for row in bench.rows() if row.mode == "lr"]
    # The accepted steps are known in advance: the drawn ones, except where the draft was late.
    for row in speculated:
        drawn = [_accepted(f"{row.repeat}.{number}", row.alpha) for number in range(row.replies)]
        assert sum(map(sum, drawn)) - row.late <= row.accepted <= sum(map(sum, drawn))
        assert row.judged + row.late == row.steps == row.replies * (SETTINGS.steps - 1)
    assert all(result.speed > 0 for result in results(bench.rows(), SETTINGS, None))
    token_settings = SyntheticSettings(**{**vars(SETTINGS), "modes": ("sd",)})
    with pytest.raises(ConfigurationError, match="vLLM's CPU build does not draw"):
        SyntheticBench(pair, token_settings, tmp_path / "others.jsonl")


def _accepted(question: str, alpha: float) -> list[bool]:
    chance = ChanceByPosition(alpha, SETTINGS.seed)
    step = Step((1,), "x", StepEnd.DELIMITER)
    pairs = [StepPair(question, "", step, step, position) for position in range(SETTINGS.steps - 1)]
    return [asyncio.run(chance.verify(pair)).accepted for pair in pairs]
