"""The formulas against the machine itself in virtual time."""

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


def drawn(simulated: SimulatedReply) -> float:
    """The share of steps that was accepted: held against this α, a few thousand steps are within 2 %."""
    return simulated.accepted / simulated.steps


def enough(alpha: float) -> int:
    """Steps after which the average is within the 2 % that are allowed."""
    return 600 if alpha in (0.0, 1.0) else 3000


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", RATIOS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_synchronous(alpha: float, c: float, depth: int) -> None:
    simulated = simulate(alpha, depth, constant(c), steps=enough(alpha), synchronous=True)
    assert drawn(simulated) == pytest.approx(alpha, abs=0.03)
    assert simulated.speedup == pytest.approx(synchronous_speedup(drawn(simulated), c, depth), rel=0.02)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", RATIOS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_asynchronous(alpha: float, c: float, depth: int) -> None:
    simulated = simulate(alpha, depth, constant(c), steps=enough(alpha))
    accepted = drawn(simulated)
    assert accepted == pytest.approx(alpha, abs=0.03)
    formula = asynchronous_speedup(accepted, c, depth)
    if is_draft_bound(c, depth):
        assert simulated.speedup == pytest.approx(formula, rel=0.02)
    else:
        # The formula's window restarts when all of it is accepted; ours slides, up to the draft's limit.
        assert formula * 0.98 <= simulated.speedup <= asynchronous_speedup(accepted, c, 1000) * 1.02
        assert simulated.speedup <= depth * 1.02


def test_a_sliding_window_gains_most_when_everything_is_accepted() -> None:
    # Depth 2, c = 0.1: restarted, two steps take 1.1; sliding, two steps take 1.
    assert simulate(1.0, 2, constant(0.1)).speedup == pytest.approx(2.0, rel=0.01)
    assert asynchronous_speedup(1.0, 0.1, 2) == pytest.approx(2 / 1.1)


def test_depth_zero_is_the_target_alone() -> None:
    assert simulate(1.0, 0, constant(0.1)).speedup == pytest.approx(1.0)


def test_where_the_assumptions_do_not_hold() -> None:
    """Step lengths that vary, and a verifier that takes time: the machine still gains, by how much is measured."""
    formula = asynchronous_speedup(0.7, 0.25, 8)

    def varying(mean: float) -> object:
        return lambda randomly: mean * randomly.uniform(0.3, 1.7)

    lengths = Durations(target=varying(1.0), draft=varying(0.25))  # type: ignore[arg-type]
    uneven = simulate(0.7, 8, lengths, steps=3000).speedup
    assert 0.9 * formula < uneven < 1.02 * formula, "lengths that vary hardly matter to a window of 8"
    slow = Durations(verifier=lambda _: 0.3)
    hedged, waiting = (simulate(0.7, 8, slow, steps=3000, hedge=hedge).speedup for hedge in (True, False))
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


def test_a_batch_that_costs_as_much_as_its_parts_gains_nothing() -> None:
    serial = Durations(draft=lambda _: 0.1, slowdown=float)
    assert simulate(1.0, 4, serial, steps=400).speedup == pytest.approx(1.0, rel=0.02)
    assert simulate(0.5, 4, serial, steps=400).speedup < 1
    free = Durations(draft=lambda _: 0.1, slowdown=lambda _: 1.0)
    assert simulate(1.0, 4, free, steps=400).speedup == simulate(1.0, 4, constant(0.1), steps=400).speedup


def test_the_cost_of_a_batch_acts_while_it_lasts() -> None:
    # Depth 2, all accepted, c = 0.5: the first step runs alone for half its time, then beside the second at half
    # speed, so both slow down together: the steps are 0.5, then 1.0 more, and so on in pairs.
    durations = Durations(draft=lambda _: 0.5, slowdown=lambda steps: 1.0 if steps == 1 else 2.0)
    two = simulate(1.0, 2, durations, steps=2)
    assert two.seconds == pytest.approx(0.5 + 2 * 0.5 + 0.5)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("token_alpha", [0.5, 0.8])
def test_both_levels_against_the_machine(alpha: float, token_alpha: float) -> None:
    c, depth, token_c, token_depth = 0.1, 12, 0.1, 3
    tokens = synchronous_speedup(token_alpha, token_c, token_depth)
    # A target step takes 1/S as long; the draft's take what they took.
    durations = Durations(target=lambda _: 1 / tokens, draft=lambda _: c)
    simulated = simulate(alpha, depth, durations, steps=enough(alpha))
    accepted = drawn(simulated)
    both = combined_speedup(accepted, c, depth, token_alpha, token_c, token_depth)
    assert simulated.steps / simulated.seconds == pytest.approx(both, rel=0.02)
    assert both <= asynchronous_speedup(accepted, c, depth) * tokens, "they multiply only if the draft gets faster too"


@pytest.mark.parametrize("c", [0.1, 0.2, 1 / 3, 0.5])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_a_shared_draft_against_its_simulation(alpha: float, c: float) -> None:
    """docs/explanation/theory.md gives the share of the bound that passes, which cannot be divided, leave."""
    found, bound = simulate_shared_draft(alpha, c, 64), shared_draft_speedup(alpha, c)
    assert 0.7 * bound <= found <= 1.01 * bound
    if alpha in (0.0, 1.0):
        assert found == pytest.approx(bound, rel=0.01)


def test_a_shared_draft_is_as_fast_as_its_passes_allow() -> None:
    assert simulate_shared_draft(1.0, 0.1, 3) == pytest.approx(4, rel=0.01), "three guesses and its own token"
    assert simulate_shared_draft(1.0, 0.1, 3, lambda tokens: 1.0 * tokens) == pytest.approx(1, rel=0.01)
    # A draft that is slower than its target is overtaken, and does no harm.
    assert simulate_shared_draft(1.0, 2.0, 8) >= 1


def test_one_level_alone_is_a_special_case_of_both() -> None:
    assert combined_speedup(0.7, 0.2, 4, 0.8, 0.1, 1) == asynchronous_speedup(0.7, 0.2, 4)
    assert combined_speedup(0.7, 0.2, 1, 0.8, 0.1, 4) == synchronous_speedup(0.8, 0.1, 4)
    assert combined_speedup(0.9, 0.9, 4, 0.9, 0.05, 8) == synchronous_speedup(0.9, 0.05, 8), "a late draft"


def both_levels_win(alpha: float, c: float, token_alpha: float, token_c: float, parallel: int) -> bool:
    steps, tokens, _ = best_split(alpha, c, token_alpha, token_c, parallel)
    return steps > 1 and tokens > 1


def test_the_region_in_which_both_levels_win() -> None:
    assert both_levels_win(0.7, 0.1, 0.7, 0.05, parallel=16)
    assert not both_levels_win(0.7, 0.1, 0.7, 0.05, parallel=2), "nothing to divide"
    assert not both_levels_win(0.0, 0.1, 0.8, 0.05, parallel=16), "no step is accepted"
    assert not both_levels_win(0.8, 0.1, 0.0, 0.05, parallel=16), "no token is"
    assert not both_levels_win(1.0, 0.05, 0.3, 0.3, parallel=8), "steps alone use all there is"


@pytest.mark.parametrize("parallel", [1, 4, 16])
def test_the_best_split_is_the_best_of_all(parallel: int) -> None:
    steps, tokens, speedup = best_split(0.6, 0.15, 0.7, 0.1, parallel)
    assert steps * tokens <= parallel
    every = [
        combined_speedup(0.6, 0.15, first, 0.7, 0.1, second)
        for first in range(1, parallel + 1)
        for second in range(1, parallel + 1)
        if first * second <= parallel
    ]
    assert speedup == max(every)
    with pytest.raises(ConfigurationError, match="at least 1"):
        best_split(0.6, 0.15, 0.7, 0.1, 0)


def test_the_table_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "theory.md").read_text(encoding="utf-8")
    cells = re.findall(r"(\d+) × (\d+): ([\d.]+)", text)
    rates = [0.2, 0.4, 0.6, 0.8, 0.9]
    splits = [best_split(alpha, 0.1, token_alpha, 0.05, 16) for alpha in rates for token_alpha in rates]
    assert [(int(steps), int(tokens), float(speedup)) for steps, tokens, speedup in cells] == [
        (steps, tokens, round(speedup, 2)) for steps, tokens, speedup in splits
    ]
