"""Measured costs, and the settings that are predicted to be fastest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import get_args

import pytest

from lookahead_agent.cost_model.costs import BatchCosts, MachineCosts, measure
from lookahead_agent.cost_model.estimator import Acceptance, ModeName, fastest, predicted_speed
from lookahead_agent.engines import ScriptedTokenizer
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.theory.formulas import shared_draft_speedup

DEPTHS = (1, 4, 8)
TOKENS = 4
"""Of a step that one forward pass looks at."""


def speeds(costs: MachineCosts, acceptance: Acceptance) -> dict[str, float]:
    """The speed of each mode, at its best depth; a shared draft writes more tokens ahead."""
    return {
        mode: max(
            predicted_speed(costs, acceptance, mode, depth, 17 if "shared" in mode else TOKENS) for depth in DEPTHS
        )
        for mode in get_args(ModeName)
    }


class MeteredEngine:
    """Takes 10 ms a token alone, and 2 ms more for each other reply, on a clock of its own."""

    def __init__(self) -> None:
        self.tokenizer = ScriptedTokenizer()
        self.tokenizer.encode("some words to have tokens")
        self.context_length = 512
        self.healthy = True
        self.in_flight = 0
        self.now = 0.0
        self.most = 0
        self._turn = asyncio.Event()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        assert len(prompt_ids) + sampling.max_tokens <= self.context_length
        assert sampling.allowed_token_ids
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0)
            for number in range(sampling.max_tokens):
                # All replies of a batch get their next token at the same time.
                self.now += (0.010 + 0.002 * (self.in_flight - 1)) / self.in_flight
                yield Delta(sampling.allowed_token_ids, None, "length" if number + 1 == sampling.max_tokens else None)
                await asyncio.sleep(0)
        finally:
            self.in_flight -= 1

    def close(self) -> None:
        """Nothing to do."""


async def test_costs_are_measured_per_token_of_each_reply() -> None:
    engine = MeteredEngine()
    costs = await measure(engine, (1, 2, 4), now=lambda: engine.now)
    assert engine.most == 4
    assert engine.in_flight == 0
    assert costs.seconds[1] == pytest.approx(0.010, rel=0.02)
    assert costs.seconds[2] == pytest.approx(0.012, rel=0.1)
    assert costs.seconds[4] == pytest.approx(0.016, rel=0.1)


async def test_another_engine_writes_meanwhile_and_stops() -> None:
    engine, other = MeteredEngine(), MeteredEngine()
    await measure(engine, (1,), beside=other, now=lambda: engine.now)
    assert other.most == 1
    assert other.in_flight == 0


async def test_a_context_that_is_too_short() -> None:
    engine = MeteredEngine()
    engine.context_length = 10
    with pytest.raises(ConfigurationError, match="10 tokens is too short"):
        await measure(engine)


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = BatchCosts(seconds={1: 0.1, 3: 0.12, 7: 0.24})
    assert costs.at(1) == 0.1
    assert costs.at(2) == pytest.approx(0.11)
    assert costs.at(5) == pytest.approx(0.18)
    assert costs.at(11) == pytest.approx(0.36)
    assert costs.free_batch(0.25) == 3
    assert BatchCosts(seconds={1: 0.1}).at(9) == 0.1
    with pytest.raises(ValueError, match="begin with a batch of 1"):
        BatchCosts(seconds={2: 0.1})


def flat(seconds: float) -> BatchCosts:
    return BatchCosts(seconds={1: seconds, 16: seconds})


FREE = MachineCosts(target=flat(0.1), beside=flat(0.1), draft=flat(0.01), draft_alone=flat(0.01))
"""Batches cost nothing, and neither engine slows the other down: the paper's assumptions."""

SMALL = MachineCosts(
    target=BatchCosts(seconds={1: 0.12, 4: 0.14, 8: 0.2, 16: 0.35}),
    beside=BatchCosts(seconds={1: 0.21, 4: 0.25, 8: 0.4, 16: 0.7}),
    draft=BatchCosts(seconds={1: 0.07, 4: 0.08, 8: 0.12, 16: 0.2}),
    draft_alone=BatchCosts(seconds={1: 0.04, 16: 0.1}),
)
"""Two cores: the target loses one of them to the draft."""


def test_under_the_papers_assumptions_both_levels_win() -> None:
    mode, depth, speed = fastest(FREE, Acceptance(0.8, 0.7), DEPTHS, TOKENS)
    assert mode == "lr+sd"
    assert depth >= 4
    found = speeds(FREE, Acceptance(0.8, 0.7))
    assert speed == pytest.approx(max(found.values()), abs=1e-3)
    assert found["off"] == 1
    assert found["lr"] > 2.5


def test_on_two_cores_token_speculation_wins() -> None:
    found = speeds(SMALL, Acceptance(0.6, 0.8))
    assert found["sd"] > 1.3
    assert found["lr"] < 1
    assert fastest(SMALL, Acceptance(0.6, 0.8), DEPTHS, TOKENS) == ("sd", 0, found["sd"])


def test_a_shared_draft_pays_where_the_draft_costs_it_nothing() -> None:
    free = speeds(FREE, Acceptance(0.0, 0.8))
    assert free["shared_draft"] > free["sd"] > 1
    assert free["shared_draft"] <= shared_draft_speedup(0.8, FREE.c)
    assert free["lr+shared_draft"] <= 1.05 * free["shared_draft"], "no step is accepted"
    small = speeds(SMALL, Acceptance(0.0, 0.8))
    assert small["shared_draft"] < small["sd"], "a core for the draft is missing to the target"
    paraphrased = speeds(FREE, Acceptance(0.9, 0.3))
    assert paraphrased["lr+shared_draft"] > 1.5 * paraphrased["shared_draft"]


@pytest.mark.parametrize("token_alpha", [0.0, 0.7])
def test_more_tokens_that_are_accepted_are_never_slower(token_alpha: float) -> None:
    less, more = (speeds(FREE, Acceptance(0.0, accepted)) for accepted in (token_alpha, token_alpha + 0.1))
    assert more["sd"] >= less["sd"] - 1e-9
    assert less["lr"] <= 1.05, "no step is accepted"
