"""Thresholds that keep a risk."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binom, fisher_exact

from lookahead_agent.calibration.pairs import OutcomeRule, fisher
from lookahead_agent.certificates.risk import (
    LEVEL,
    RISKS,
    ScoredPair,
    level_of_each,
    p_value,
    thresholds,
    upper_bound,
)
from lookahead_agent.errors import ConfigurationError

GRID = [step / 20 for step in range(21)]


def pairs_of(scores: Sequence[float], errors: Sequence[bool]) -> list[ScoredPair]:
    return [ScoredPair(score, error) for score, error in zip(scores, errors, strict=True)]


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=2, max_size=300), st.floats(0.01, 0.5))
def test_a_larger_risk_never_has_a_stricter_threshold(pairs: list[tuple[float, bool]], level: float) -> None:
    assume(len({error for _, error in pairs}) == 2)
    found = thresholds([ScoredPair(*pair) for pair in pairs], GRID, level=level)
    values = [found[risk].value for risk in RISKS if risk in found]
    assert values == sorted(values, reverse=True)
    assert list(found) == [risk for risk in RISKS if risk >= min(found, default=1)]
    for risk, threshold in found.items():
        accepted = [error for score, error in pairs if score >= threshold.value]
        assert (threshold.accepted, threshold.errors) == (len(accepted), sum(accepted))
        assert threshold.errors <= risk * threshold.accepted
        assert threshold.bound <= risk + 1e-9


def test_thresholds_are_riskier_than_stated_no_more_often_than_promised() -> None:
    # The chance of an error falls as the score rises, and what a threshold risks is known.
    def risk_above(value: float) -> float:
        return 0.15 * (1 - value)  # the mean of 0.3 * (1 - score) over scores above the value

    chance = random.Random(1)
    wrong = dict.fromkeys(RISKS, 0)
    runs = 400
    for _ in range(runs):
        scores = [chance.random() for _ in range(300)]
        pairs = pairs_of(scores, [chance.random() < 0.3 * (1 - score) for score in scores])
        for risk, threshold in thresholds(pairs, GRID).items():
            wrong[risk] += risk_above(threshold.value) > risk
    # Three standard deviations of the promised share.
    most = runs * LEVEL + 3 * math.sqrt(runs * LEVEL * (1 - LEVEL))
    assert all(count <= most for count in wrong.values()), wrong
    assert wrong[0.1] > 0, "a promise kept by accepting nothing is none"


def test_one_more_pair_than_needed_decides() -> None:
    enough = math.ceil(math.log(level_of_each(LEVEL)) / math.log(1 - 0.02))
    right_pairs = pairs_of([1.0] * enough + [0.0], [False] * enough + [True])
    assert 0.02 in thresholds(right_pairs, GRID)
    assert 0.02 not in thresholds(right_pairs[1:], GRID)
    assert 0.02 not in thresholds(right_pairs, GRID, tests=2), "the best of two needs more"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "no labelled pairs"),
        (pairs_of([0.1, 0.2], [True, True]), "all of 2 pairs"),
        (pairs_of([0.1, 0.2], [False, False]), "none of 2 pairs"),
        (pairs_of([0.1, math.nan], [True, False]), "not a number"),
    ],
)
def test_pairs_that_say_nothing(pairs: list[ScoredPair], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        thresholds(pairs, GRID)


def test_a_level_is_a_probability() -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        thresholds(pairs_of([0.1, 0.2], [True, False]), GRID, level=1.0)


@given(st.integers(1, 400), st.data(), st.sampled_from(RISKS))
def test_p_values_are_those_of_the_binomial(accepted: int, data: st.DataObject, risk: float) -> None:
    errors = data.draw(st.integers(0, accepted))
    assert p_value(accepted, errors, risk) == pytest.approx(binom.cdf(errors, accepted, risk))


def test_p_values_of_many_pairs_do_not_vanish() -> None:
    assert p_value(100_000, 20_000, 0.2) == pytest.approx(0.5, abs=0.01)


@given(st.integers(1, 300), st.data())
def test_bounds_are_where_the_p_value_is_the_level(accepted: int, data: st.DataObject) -> None:
    errors = data.draw(st.integers(0, accepted - 1))
    assert p_value(accepted, errors, upper_bound(accepted, errors, 0.1)) == pytest.approx(0.1)
    assert upper_bound(accepted, accepted, 0.1) == 1.0


@given(st.floats(0.001, 0.5))
def test_the_levels_of_a_ladder_add_up(level: float) -> None:
    each = level_of_each(level)
    for risk in RISKS:
        assert sum(each ** (risk / other) for other in RISKS if other <= risk) <= level + 1e-12
    assert each > 0.6 * level


@given(st.integers(1, 20), st.data())
def test_fisher(count: int, data: st.DataObject) -> None:
    draft, target = (data.draw(st.integers(0, count)) for _ in range(2))
    expected = fisher_exact([[draft, count - draft], [target, count - target]], alternative="less").pvalue
    assert fisher(draft, target, count) == pytest.approx(expected)


def test_the_rule_asks_twice() -> None:
    rule = OutcomeRule()
    right, wrong = [True] * 12, [False] * 12
    assert rule.missing([], []) == 4
    assert rule.missing(right[:4], right[:4]) == 0
    assert not rule.suspected(right[:3] + wrong[:1], right[:4])
    assert rule.missing(wrong[:4], right[:4]) == 12
    assert rule.changes_outcome(wrong[:4] + wrong, right[:4] + right)
    assert not rule.changes_outcome(wrong[:4] + right, right[:4] + right), "a suspicion alone decides nothing"
    assert not rule.changes_outcome(right[:4] + wrong, right[:4] + right), "nobody was asked again"


def chance_of_an_error(rule: OutcomeRule, draft: float, target: float) -> float:
    """Probability that a pair is called errors whose continuations are right with these probabilities."""

    def of_counts(count: int, holds: Callable[[list[bool], list[bool]], bool]) -> float:
        each = range(count + 1)
        likely = {(d, t): binom.pmf(d, count, draft) * binom.pmf(t, count, target) for d in each for t in each}
        return sum(p for (d, t), p in likely.items() if holds(outcomes(d, count), outcomes(t, count)))

    suspicion = [False] * rule.seeds, [True] * rule.seeds
    return of_counts(rule.seeds, rule.suspected) * of_counts(
        rule.confirm, lambda d, t: rule.changes_outcome(suspicion[0] + d, suspicion[1] + t)
    )


def outcomes(right: int, count: int) -> list[bool]:
    return [True] * right + [False] * (count - right)


def test_a_step_that_changes_nothing_is_hardly_ever_called_an_error() -> None:
    rule = OutcomeRule()
    for right in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        assert chance_of_an_error(rule, right, right) <= 0.0005, "as docs/risk.md says"
    assert chance_of_an_error(rule, 0.0, 1.0) == pytest.approx(1.0)
    for draft, target, found in ((0.25, 1.0, 0.94), (0.5, 1.0, 0.42), (0.4, 0.8, 0.13)):
        assert chance_of_an_error(rule, draft, target) == pytest.approx(found, abs=0.005)
