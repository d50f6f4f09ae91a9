"""The most permissive threshold that keeps a risk, with a finite-sample bound (learn then test, arXiv 2110.01052).

Thresholds of a fixed grid are tested in sequence, until one fails. The first is the strictest that accepts enough pairs
for a test. The p-value P(Bin(n, ρ) ≤ k) is log-concave in ρ, so P(Bin(n, cρ) ≤ k) ≤ P(Bin(n, ρ) ≤ k)^c for c ≥ 1. A
threshold for the risk r is invalid with a probability of at most Σ δ'^(r/ρ) over the ladder's ρ ≤ r. The level δ' of
each test bounds this sum by δ. docs/explanation/risk.md has the assumptions.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from lookahead_agent.errors import ConfigurationError

RISKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # the ladder of risks; each is at least twice the one before
_PARTS = 1 << 60  # resolution of the search for probabilities in [0, 1]
LEVEL = 0.1  # probability δ with which a threshold may be riskier than stated


@dataclass(frozen=True)
class ScoredPair:
    """A pair as a verifier sees it, and its label."""

    score: float  # compared with the threshold; infinite where the threshold does not matter
    changes_outcome: bool


@dataclass(frozen=True)
class Threshold:
    """A threshold that keeps a risk."""

    value: float  # least score of an accepted pair
    risk: float  # largest share of errors among accepted pairs
    accepted: int  # pairs that reach it
    errors: int  # accepted pairs whose draft step changes the outcome
    pairs: int  # pairs in the calibration
    bound: float  # Clopper-Pearson upper bound on the share of errors from these counts alone, at the tests' level


def thresholds(
    pairs: Sequence[ScoredPair], grid: Sequence[float], *, level: float = LEVEL, tests: int = 1
) -> dict[float, Threshold]:
    """The most permissive threshold for each risk of `RISKS`; a risk that no threshold keeps is left out.

    Pairs must be independent, one of each problem, and the grid fixed in advance; `tests` verifiers are tried on them.
    """
    _check(pairs)
    test_level = level_of_each(level / tests)
    found: dict[float, Threshold] = {}
    best: Threshold | None = None
    for risk in RISKS:
        kept = _most_accepting(pairs, grid, risk, test_level)
        if kept is not None and (best is None or kept.value < best.value):
            best = kept
        if best is not None:
            found[risk] = replace(best, risk=risk)
    return found


def _check(pairs: Sequence[ScoredPair]) -> None:
    if not pairs:
        raise ConfigurationError("there are no labelled pairs: collect some with `lookahead-agent calibrate collect`")
    if any(math.isnan(pair.score) for pair in pairs):
        raise ConfigurationError("a pair's score is not a number: score the pairs again")
    errors = sum(pair.changes_outcome for pair in pairs)
    if errors in (0, len(pairs)):
        cause = f"{'all' if errors else 'none'} of {len(pairs)} pairs change the outcome, so no threshold can be learnt"
        raise ConfigurationError(f"{cause}: collect more pairs, of harder problems or with another draft")


def _most_accepting(pairs: Sequence[ScoredPair], grid: Sequence[float], risk: float, level: float) -> Threshold | None:
    kept: tuple[float, int, int] | None = None
    for value in sorted(set(grid), reverse=True):
        labels = [pair.changes_outcome for pair in pairs if pair.score >= value]
        accepted, errors = len(labels), sum(labels)
        if accepted * math.log1p(-risk) > math.log(level):
            continue  # too few for a test, even without errors
        if p_value(accepted, errors, risk) > level:
            break
        kept = value, accepted, errors
    if kept is None:
        return None
    value, accepted, errors = kept
    return Threshold(value, risk, accepted, errors, len(pairs), upper_bound(accepted, errors, level))


def p_value(accepted: int, errors: int, risk: float) -> float:
    """P(Bin(accepted, risk) ≤ errors): the probability of so few errors at this risk."""

    def log_of(count: int) -> float:
        ways = math.lgamma(accepted + 1) - math.lgamma(count + 1) - math.lgamma(accepted - count + 1)
        return ways + count * math.log(risk) + (accepted - count) * math.log1p(-risk)

    return min(math.fsum(math.exp(log_of(count)) for count in range(errors + 1)), 1.0)


def upper_bound(accepted: int, errors: int, level: float) -> float:
    """The risk at which the probability of so few errors is `level` (Clopper and Pearson)."""
    if errors >= accepted:
        return 1.0
    return bisect_left(range(_PARTS), True, key=lambda part: p_value(accepted, errors, part / _PARTS) <= level) / _PARTS


@cache
def level_of_each(level: float) -> float:
    """The level δ' of each risk's tests, with which a threshold is invalid with probability δ = `level` at most."""
    if not 0 < level < 1:
        raise ConfigurationError("a level is a probability between 0 and 1")

    def total(test_level: float) -> float:
        return max(math.fsum(test_level ** (risk / other) for other in RISKS if other <= risk) for risk in RISKS)

    too_large = bisect_left(range(_PARTS), True, key=lambda part: total(level * part / _PARTS) > level)
    return level * (too_large - 1) / _PARTS
