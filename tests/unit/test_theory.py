"""The formulas against the machine itself in virtual time."""

from __future__ import annotations

import random

import pytest

from lookahead_agent.decoding import DecodingSettings
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.simulation import Durations, simulate
from lookahead_agent.theory import (
    asynchronous_speedup,
    is_draft_bound,
    synchronous_speedup,
    token_speculation_speedup,
)
from tests.unit.scripts import Pair, ScriptedVerifier

ALPHAS = [0.0, 0.5, 0.8, 1.0]
RATIOS = [0.1, 0.33]
DEPTHS = [1, 2, 4, 8]


def constant(c: float) -> Durations:
    return Durations(draft=lambda _: c)


def enough(alpha: float) -> int:
    """Steps after which the average is within the 2 % that are allowed."""
    return 600 if alpha in (0.0, 1.0) else 16_000


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", RATIOS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_synchronous(alpha: float, c: float, depth: int) -> None:
    simulated = simulate(alpha, depth, constant(c), steps=enough(alpha), synchronous=True)
    assert simulated.speedup == pytest.approx(synchronous_speedup(alpha, c, depth), rel=0.02)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", RATIOS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_asynchronous(alpha: float, c: float, depth: int) -> None:
    simulated = simulate(alpha, depth, constant(c), steps=enough(alpha)).speedup
    formula = asynchronous_speedup(alpha, c, depth)
    if is_draft_bound(c, depth):
        assert simulated == pytest.approx(formula, rel=0.02)
    else:
        # The formula's window restarts when all of it is accepted; ours slides, up to the draft's limit.
        assert formula * 0.98 <= simulated <= asynchronous_speedup(alpha, c, 1000) * 1.02
        assert simulated <= depth * 1.02


def test_a_sliding_window_gains_most_when_everything_is_accepted() -> None:
    # Depth 2, c = 0.1: restarted, two steps take 1.1; sliding, two steps take 1.
    assert simulate(1.0, 2, constant(0.1)).speedup == pytest.approx(2.0, rel=0.01)
    assert asynchronous_speedup(1.0, 0.1, 2) == pytest.approx(2 / 1.1)


def test_depth_zero_is_the_target_alone() -> None:
    assert simulate(1.0, 0, constant(0.1)).speedup == pytest.approx(1.0)


def test_token_level_is_the_synchronous_formula() -> None:
    assert token_speculation_speedup(0.8, 0.1, 4) == synchronous_speedup(0.8, 0.1, 4)


def test_where_the_assumptions_do_not_hold() -> None:
    """Step lengths that vary, and a verifier that takes time: the machine still gains, by how much is measured."""
    formula = asynchronous_speedup(0.7, 0.25, 8)

    def varying(mean: float) -> object:
        return lambda randomly: mean * randomly.uniform(0.3, 1.7)

    uneven = simulate(0.7, 8, Durations(target=varying(1.0), draft=varying(0.25))).speedup  # type: ignore[arg-type]
    assert 0.9 * formula < uneven < 1.02 * formula, "lengths that vary hardly matter to a window of 8"
    slow = Durations(verifier=lambda _: 0.3)
    hedged, waiting = (simulate(0.7, 8, slow, hedge=hedge).speedup for hedge in (True, False))
    assert waiting < hedged < formula


@pytest.mark.parametrize(
    ("alpha", "c", "depth"), [(-0.1, 0.5, 1), (1.1, 0.5, 1), (0.5, 0, 1), (0.5, 1.1, 1), (0.5, 0.5, 0)]
)
def test_values_out_of_range(alpha: float, c: float, depth: int) -> None:
    for formula in (synchronous_speedup, asynchronous_speedup):
        with pytest.raises(ConfigurationError):
            formula(alpha, c, depth)


@pytest.mark.parametrize("synchronous", [True, False])
def test_the_decoder_on_scripted_engines_agrees_with_the_simulation(synchronous: bool) -> None:
    steps = [f"Step {i}.\n\n" for i in range(300)]
    randomly = random.Random(1)
    accepted = {step: randomly.random() < 0.7 for step in steps}
    pair = Pair(steps, steps, target_seconds=4.0, draft_seconds=1.0)
    verifier = ScriptedVerifier(lambda draft, target: accepted[draft])
    reply = pair.run(verifier, DecodingSettings(depth=4, synchronous=synchronous))
    alpha = sum(accepted.values()) / len(accepted)
    speedup = 4.0 * reply.report.steps / reply.report.seconds["total"]
    formula = synchronous_speedup if synchronous else asynchronous_speedup
    assert speedup == pytest.approx(formula(alpha, 0.25, 4), rel=0.05)
