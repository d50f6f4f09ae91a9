"""The most accepting threshold that keeps a risk, with a finite-sample bound (learn then test, arXiv 2110.01052).

Thresholds of a fixed grid are tested one after another, from the strictest that accepts enough pairs to be tested at
all, until one fails. In ρ the p-value P(Bin(n, ρ) ≤ k) is log-concave, so P(Bin(n, cρ) ≤ k) ≤ P(Bin(n, ρ) ≤ k)^c for
c ≥ 1. A threshold taken for the risk r is wrong with a probability of at most Σ δ'^(r/ρ) over the ladder's ρ ≤ r, and
the level δ' of each test makes that δ. docs/explanation/risk.md has the assumptions.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from lookahead_agent.errors import ConfigurationError

RISKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # risks that are tested; each at least twice the one before
_PARTS = 1 << 60  # of 1: how finely probabilities are searched
LEVEL = 0.1  # probability δ with which a threshold may be riskier than stated


@dataclass(frozen=True)
class ScoredPair:
    """A pair as a verifier sees it, and its label."""

    score: float  # held against the threshold; infinite where the pair is accepted or rejected whatever it is
    changes_outcome: bool


@dataclass(frozen=True)
class Threshold:
    """A threshold that keeps a risk."""

    value: float  # least score of an accepted pair
    risk: float  # share of errors among accepted pairs that it keeps
    accepted: int  # pairs that reach it
    errors: int  # accepted pairs whose draft step changes the outcome
    pairs: int  # of the calibration
    bound: float  # upper bound of the share of errors by these counts alone (Clopper and Pearson), at the tests' level


def thresholds(
    pairs: Sequence[ScoredPair], grid: Sequence[float], *, level: float = LEVEL, tests: int = 1
) -> dict[float, Threshold]:
    """The most accepting threshold by risk of `RISKS`; risks that no threshold keeps are left out.

    Pairs are independent, one of a problem, and the grid was fixed before. `tests` verifiers are tried on them.
    """
    _check(pairs)
    each = level_of_each(level / tests)
    found: dict[float, Threshold] = {}
    best: Threshold | None = None
    for risk in RISKS:
        kept = _most_accepting(pairs, grid, risk, each)
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
        which = f"{'all' if errors else 'none'} of {len(pairs)} pairs change the outcome, so no threshold can be learnt"
        raise ConfigurationError(f"{which}: collect more pairs, of harder problems or with another draft")


def _most_accepting(pairs: Sequence[ScoredPair], grid: Sequence[float], risk: float, level: float) -> Threshold | None:
    kept: tuple[float, int, int] | None = None
    for value in sorted(set(grid), reverse=True):
        of_accepted = [pair.changes_outcome for pair in pairs if pair.score >= value]
        accepted, errors = len(of_accepted), sum(of_accepted)
        if accepted * math.log1p(-risk) > math.log(level):
            continue  # too few to be tested, whatever they are
        if p_value(accepted, errors, risk) > level:
            break
        kept = value, accepted, errors
    if kept is None:
        return None
    value, accepted, errors = kept
    return Threshold(value, risk, accepted, errors, len(pairs), upper_bound(accepted, errors, level))


def p_value(accepted: int, errors: int, risk: float) -> float:
    """P(Bin(accepted, risk) ≤ errors): how likely so few are errors if the risk is no smaller."""

    def log_of(count: int) -> float:
        ways = math.lgamma(accepted + 1) - math.lgamma(count + 1) - math.lgamma(accepted - count + 1)
        return ways + count * math.log(risk) + (accepted - count) * math.log1p(-risk)

    return min(math.fsum(math.exp(log_of(count)) for count in range(errors + 1)), 1.0)


def upper_bound(accepted: int, errors: int, level: float) -> float:
    """The risk at which so few errors are as likely as the level (Clopper and Pearson)."""
    if errors >= accepted:
        return 1.0
    return bisect_left(range(_PARTS), True, key=lambda part: p_value(accepted, errors, part / _PARTS) <= level) / _PARTS


@cache
def level_of_each(level: float) -> float:
    """The level δ' of each risk's tests with which a threshold is riskier than stated with probability δ at most."""
    if not 0 < level < 1:
        raise ConfigurationError("a level is a probability between 0 and 1")

    def total(each: float) -> float:
        return max(math.fsum(each ** (risk / other) for other in RISKS if other <= risk) for risk in RISKS)

    too_large = bisect_left(range(_PARTS), True, key=lambda part: total(level * part / _PARTS) > level)
    return level * (too_large - 1) / _PARTS
