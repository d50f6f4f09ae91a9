"""The formulas against the scheduler in virtual time."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from lookahead_agent.decoding import DecodingSettings
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.theory.formulas import (
    asynchronous_speedup,
    best_split,
    combined_speedup,
    is_draft_bound,
    shared_draft_speedup,
    synchronous_speedup,
)
from lookahead_agent.theory.simulation import Durations, SimulatedReply, simulate, simulate_shared_draft
from tests.unit.scripts import Pair, ScriptedVerifier

ALPHAS = [0.0, 0.5, 0.8, 1.0]
RATIOS = [0.1, 0.33]
DEPTHS = [1, 2, 4, 8]


def constant(c: float) -> Durations:
    return Durations(draft=lambda _: c)


def acceptance_rate(simulated: SimulatedReply) -> float:
    """Measured share of accepted steps: with it as α, a few thousand steps agree with the formula within 2 %."""
    return simulated.accepted / simulated.steps


def enough_steps(alpha: float) -> int:
    """Number of steps after which the average is within the tolerance of 2 %."""
    return 600 if alpha in (0.0, 1.0) else 3000


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", RATIOS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_synchronous_simulation_agrees_with_the_formula(alpha: float, c: float, depth: int) -> None:
    simulated = simulate(alpha, depth, constant(c), steps=enough_steps(alpha), synchronous=True)
    assert acceptance_rate(simulated) == pytest.approx(alpha, abs=0.03)
    assert simulated.speedup == pytest.approx(synchronous_speedup(acceptance_rate(simulated), c, depth), rel=0.02)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", RATIOS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_asynchronous_simulation_agrees_with_the_formula(alpha: float, c: float, depth: int) -> None:
    simulated = simulate(alpha, depth, constant(c), steps=enough_steps(alpha))
    accepted = acceptance_rate(simulated)
    assert accepted == pytest.approx(alpha, abs=0.03)
    formula = asynchronous_speedup(accepted, c, depth)
    if is_draft_bound(c, depth):
        assert simulated.speedup == pytest.approx(formula, rel=0.02)
    else:
        # The formula restarts a fully accepted window; the scheduler's window slides, up to the draft's limit.
        assert formula * 0.98 <= simulated.speedup <= asynchronous_speedup(accepted, c, 1000) * 1.02
        assert simulated.speedup <= depth * 1.02


def test_sliding_window_beats_a_restarted_one_if_every_step_is_accepted() -> None:
    # Depth 2, c = 0.1: two steps take 1.1 in a restarted window and 1 in a sliding one.
    assert simulate(1.0, 2, constant(0.1)).speedup == pytest.approx(2.0, rel=0.01)
    assert asynchronous_speedup(1.0, 0.1, 2) == pytest.approx(2 / 1.1)


def test_depth_zero_is_as_fast_as_the_target_alone() -> None:
    assert simulate(1.0, 0, constant(0.1)).speedup == pytest.approx(1.0)


def test_uneven_steps_hardly_change_the_speedup_and_a_slow_verifier_lowers_it() -> None:
    """The formula assumes equal steps and an instant verifier; here the scheduler runs without these assumptions."""
    formula = asynchronous_speedup(0.7, 0.25, 8)

    def varying(mean: float) -> object:
        return lambda rng: mean * rng.uniform(0.3, 1.7)

    lengths = Durations(target=varying(1.0), draft=varying(0.25))  # type: ignore[arg-type]
    uneven = simulate(0.7, 8, lengths, steps=3000).speedup
    assert 0.9 * formula < uneven < 1.02 * formula, "uneven step lengths hardly matter in a window of 8"
    slow_verifier = Durations(verifier=lambda _: 0.3)
    hedged, unhedged = (simulate(0.7, 8, slow_verifier, steps=3000, hedge=hedge).speedup for hedge in (True, False))
    assert unhedged < hedged < formula


@pytest.mark.parametrize(
    ("alpha", "c", "depth"), [(-0.1, 0.5, 1), (1.1, 0.5, 1), (0.5, 0, 1), (0.5, 1.1, 1), (0.5, 0.5, 0)]
)
def test_arguments_out_of_range_raise(alpha: float, c: float, depth: int) -> None:
    for formula in (synchronous_speedup, asynchronous_speedup):
        with pytest.raises(ConfigurationError):
            formula(alpha, c, depth)


@pytest.mark.parametrize("synchronous", [True, False])
def test_decoder_on_scripted_engines_agrees_with_the_formula(synchronous: bool) -> None:
    steps = [f"Step {i}.\n\n" for i in range(300)]
    rng = random.Random(1)
    accepted = {step: rng.random() < 0.7 for step in steps}
    pair = Pair(steps, steps, target_seconds=4.0, draft_seconds=1.0)
    verifier = ScriptedVerifier(lambda draft, target: accepted[draft])
    reply = pair.run(verifier, DecodingSettings(depth=4, synchronous=synchronous))
    alpha = sum(accepted.values()) / len(accepted)
    speedup = 4.0 * reply.report.steps / reply.report.seconds["total"]
    formula = synchronous_speedup if synchronous else asynchronous_speedup
    assert speedup == pytest.approx(formula(alpha, 0.25, 4), rel=0.05)


def test_batch_as_slow_as_sequential_steps_gives_no_speedup() -> None:
    sequential = Durations(draft=lambda _: 0.1, slowdown=float)
    assert simulate(1.0, 4, sequential, steps=400).speedup == pytest.approx(1.0, rel=0.02)
    assert simulate(0.5, 4, sequential, steps=400).speedup < 1
    without_slowdown = Durations(draft=lambda _: 0.1, slowdown=lambda _: 1.0)
    assert simulate(1.0, 4, without_slowdown, steps=400).speedup == simulate(1.0, 4, constant(0.1), steps=400).speedup


def test_batch_slowdown_applies_only_while_steps_overlap() -> None:
    # Depth 2, all steps accepted, c = 0.5: the first step runs alone for half of its time. Then the second joins,
    # and both run at half speed until the first is complete.
    durations = Durations(draft=lambda _: 0.5, slowdown=lambda steps: 1.0 if steps == 1 else 2.0)
    simulated = simulate(1.0, 2, durations, steps=2)
    assert simulated.seconds == pytest.approx(0.5 + 2 * 0.5 + 0.5)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("token_alpha", [0.5, 0.8])
def test_combined_speedup_agrees_with_the_simulation(alpha: float, token_alpha: float) -> None:
    c, depth, token_c, token_depth = 0.1, 12, 0.1, 3
    tokens = synchronous_speedup(token_alpha, token_c, token_depth)
    # Token speculation shortens target steps to 1/S; draft steps keep their length.
    durations = Durations(target=lambda _: 1 / tokens, draft=lambda _: c)
    simulated = simulate(alpha, depth, durations, steps=enough_steps(alpha))
    accepted = acceptance_rate(simulated)
    combined = combined_speedup(accepted, c, depth, token_alpha, token_c, token_depth)
    assert simulated.steps / simulated.seconds == pytest.approx(combined, rel=0.02)
    assert combined <= asynchronous_speedup(accepted, c, depth) * tokens, "speedups multiply only with a faster draft"


@pytest.mark.parametrize("c", [0.1, 0.2, 1 / 3, 0.5])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_shared_draft_simulation_stays_close_below_its_bound(alpha: float, c: float) -> None:
    """docs/explanation/theory.md gives the share of the bound that indivisible passes reach."""
    simulated, bound = simulate_shared_draft(alpha, c, 64), shared_draft_speedup(alpha, c)
    assert 0.7 * bound <= simulated <= 1.01 * bound
    if alpha in (0.0, 1.0):
        assert simulated == pytest.approx(bound, rel=0.01)


def test_shared_draft_speedup_depends_on_the_cost_of_its_passes() -> None:
    assert simulate_shared_draft(1.0, 0.1, 3) == pytest.approx(4, rel=0.01), "three draft tokens and the target's own"
    assert simulate_shared_draft(1.0, 0.1, 3, lambda tokens: 1.0 * tokens) == pytest.approx(1, rel=0.01)
    # The target overtakes a slower draft, which does no harm.
    assert simulate_shared_draft(1.0, 2.0, 8) >= 1


def test_combined_speedup_reduces_to_one_level_if_the_other_is_off() -> None:
    assert combined_speedup(0.7, 0.2, 4, 0.8, 0.1, 1) == asynchronous_speedup(0.7, 0.2, 4)
    assert combined_speedup(0.7, 0.2, 1, 0.8, 0.1, 4) == synchronous_speedup(0.8, 0.1, 4)
    assert combined_speedup(0.9, 0.9, 4, 0.9, 0.05, 8) == synchronous_speedup(0.9, 0.05, 8), "the draft is always late"


def both_levels_win(alpha: float, c: float, token_alpha: float, token_c: float, parallel: int) -> bool:
    steps, tokens, _ = best_split(alpha, c, token_alpha, token_c, parallel)
    return steps > 1 and tokens > 1


def test_best_split_uses_both_levels_only_where_both_pay() -> None:
    assert both_levels_win(0.7, 0.1, 0.7, 0.05, parallel=16)
    assert not both_levels_win(0.7, 0.1, 0.7, 0.05, parallel=2), "there is no parallelism to divide"
    assert not both_levels_win(0.0, 0.1, 0.8, 0.05, parallel=16), "no step is accepted"
    assert not both_levels_win(0.8, 0.1, 0.0, 0.05, parallel=16), "no token is accepted"
    assert not both_levels_win(1.0, 0.05, 0.3, 0.3, parallel=8), "step speculation alone uses all parallelism"


@pytest.mark.parametrize("parallel", [1, 4, 16])
def test_best_split_is_the_maximum_over_all_splits(parallel: int) -> None:
    steps, tokens, speedup = best_split(0.6, 0.15, 0.7, 0.1, parallel)
    assert steps * tokens <= parallel
    speedups = [
        combined_speedup(0.6, 0.15, step_depth, 0.7, 0.1, token_depth)
        for step_depth in range(1, parallel + 1)
        for token_depth in range(1, parallel + 1)
        if step_depth * token_depth <= parallel
    ]
    assert speedup == max(speedups)
    with pytest.raises(ConfigurationError, match="at least 1"):
        best_split(0.6, 0.15, 0.7, 0.1, 0)


def test_table_in_the_documentation_equals_best_split() -> None:
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "theory.md").read_text(encoding="utf-8")
    cells = re.findall(r"(\d+) × (\d+): ([\d.]+)", text)
    rates = [0.2, 0.4, 0.6, 0.8, 0.9]
    splits = [best_split(alpha, 0.1, token_alpha, 0.05, 16) for alpha in rates for token_alpha in rates]
    assert [(int(steps), int(tokens), float(speedup)) for steps, tokens, speedup in cells] == [
        (steps, tokens, round(speedup, 2)) for steps, tokens, speedup in splits
    ]
