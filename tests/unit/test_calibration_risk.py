"""Thresholds with a bounded risk, and the rule that labels pairs."""

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
def test_larger_risk_never_has_a_stricter_threshold(pairs: list[tuple[float, bool]], level: float) -> None:
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


def test_thresholds_exceed_their_risk_no_more_often_than_the_level() -> None:
    # The chance of an error falls as the score rises, so the true risk of a threshold is known.
    def risk_above(value: float) -> float:
        return 0.15 * (1 - value)  # the mean of 0.3 * (1 - score) over scores above the value

    rng = random.Random(1)
    exceeded = dict.fromkeys(RISKS, 0)
    runs = 400
    for _ in range(runs):
        scores = [rng.random() for _ in range(300)]
        pairs = pairs_of(scores, [rng.random() < 0.3 * (1 - score) for score in scores])
        for risk, threshold in thresholds(pairs, GRID).items():
            exceeded[risk] += risk_above(threshold.value) > risk
    # Three standard deviations of the promised share.
    most = runs * LEVEL + 3 * math.sqrt(runs * LEVEL * (1 - LEVEL))
    assert all(count <= most for count in exceeded.values()), exceeded
    assert exceeded[0.1] > 0, "thresholds that accept nothing would keep every bound"


def test_threshold_needs_a_minimum_number_of_pairs() -> None:
    enough = math.ceil(math.log(level_of_each(LEVEL)) / math.log(1 - 0.02))
    pairs = pairs_of([1.0] * enough + [0.0], [False] * enough + [True])
    assert 0.02 in thresholds(pairs, GRID)
    assert 0.02 not in thresholds(pairs[1:], GRID)
    assert 0.02 not in thresholds(pairs, GRID, tests=2), "two tests need more pairs"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "no labelled pairs"),
        (pairs_of([0.1, 0.2], [True, True]), "all of 2 pairs"),
        (pairs_of([0.1, 0.2], [False, False]), "none of 2 pairs"),
        (pairs_of([0.1, math.nan], [True, False]), "not a number"),
    ],
)
def test_uninformative_pairs_are_rejected(pairs: list[ScoredPair], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        thresholds(pairs, GRID)


def test_level_outside_0_to_1_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        thresholds(pairs_of([0.1, 0.2], [True, False]), GRID, level=1.0)


@given(st.integers(1, 400), st.data(), st.sampled_from(RISKS))
def test_p_values_equal_those_of_the_binomial_distribution(accepted: int, data: st.DataObject, risk: float) -> None:
    errors = data.draw(st.integers(0, accepted))
    assert p_value(accepted, errors, risk) == pytest.approx(binom.cdf(errors, accepted, risk))


def test_p_values_of_many_pairs_do_not_underflow() -> None:
    assert p_value(100_000, 20_000, 0.2) == pytest.approx(0.5, abs=0.01)


@given(st.integers(1, 300), st.data())
def test_p_value_at_the_upper_bound_is_the_level(accepted: int, data: st.DataObject) -> None:
    errors = data.draw(st.integers(0, accepted - 1))
    assert p_value(accepted, errors, upper_bound(accepted, errors, 0.1)) == pytest.approx(0.1)
    assert upper_bound(accepted, accepted, 0.1) == 1.0


@given(st.floats(0.001, 0.5))
def test_levels_of_all_risks_add_up_to_at_most_the_total(level: float) -> None:
    own_level = level_of_each(level)
    for risk in RISKS:
        assert sum(own_level ** (risk / other) for other in RISKS if other <= risk) <= level + 1e-12
    assert own_level > 0.6 * level


@given(st.integers(1, 20), st.data())
def test_fisher_equals_scipys_exact_test(count: int, data: st.DataObject) -> None:
    draft, target = (data.draw(st.integers(0, count)) for _ in range(2))
    expected = fisher_exact([[draft, count - draft], [target, count - target]], alternative="less").pvalue
    assert fisher(draft, target, count) == pytest.approx(expected)


def test_outcome_rule_confirms_a_suspicion_with_more_outcomes() -> None:
    rule = OutcomeRule()
    correct, wrong = [True] * 12, [False] * 12
    assert rule.count_missing([], []) == 4
    assert rule.count_missing(correct[:4], correct[:4]) == 0
    assert not rule.is_suspected(correct[:3] + wrong[:1], correct[:4])
    assert rule.count_missing(wrong[:4], correct[:4]) == 12
    assert rule.changes_outcome(wrong[:4] + wrong, correct[:4] + correct)
    assert not rule.changes_outcome(wrong[:4] + correct, correct[:4] + correct), "a suspicion alone is no error"
    assert not rule.changes_outcome(correct[:4] + wrong, correct[:4] + correct), "there was no suspicion to confirm"


def chance_of_an_error(rule: OutcomeRule, draft: float, target: float) -> float:
    """Probability that the rule finds an error, from the accuracies of both continuations."""

    def of_counts(count: int, holds: Callable[[list[bool], list[bool]], bool]) -> float:
        counts = range(count + 1)
        joint = {(d, t): binom.pmf(d, count, draft) * binom.pmf(t, count, target) for d in counts for t in counts}
        return sum(p for (d, t), p in joint.items() if holds(outcomes(d, count), outcomes(t, count)))

    suspicion = [False] * rule.seeds, [True] * rule.seeds
    return of_counts(rule.seeds, rule.is_suspected) * of_counts(
        rule.confirm, lambda d, t: rule.changes_outcome(suspicion[0] + d, suspicion[1] + t)
    )


def outcomes(correct: int, count: int) -> list[bool]:
    return [True] * correct + [False] * (count - correct)


def test_outcome_rule_rarely_labels_a_harmless_step_as_an_error() -> None:
    rule = OutcomeRule()
    for accuracy in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        assert chance_of_an_error(rule, accuracy, accuracy) <= 0.0005, "docs/explanation/risk.md states this bound"
    assert chance_of_an_error(rule, 0.0, 1.0) == pytest.approx(1.0)
    for draft, target, probability in ((0.25, 1.0, 0.94), (0.5, 1.0, 0.42), (0.4, 0.8, 0.13)):
        assert chance_of_an_error(rule, draft, target) == pytest.approx(probability, abs=0.005)
