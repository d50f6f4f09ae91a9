"""A sequential test of whether accepted steps are disputed more often than those of the calibration.

If a share of at most b is disputed, the likelihood ratio of another share q > b after any number of steps has a mean of
at most 1, and so has the mean of several ratios. By Ville's inequality it ever reaches 1/δ with a probability of at
most δ: the test may be looked at after every step, for ever.
"""

from __future__ import annotations

import math

from lookahead_agent.certificates.risk import upper_bound

DISPUTED_BELOW = 0.5
"""The target, asked whether two steps are equivalent, disputes them with less p(yes)."""
LEVEL = 0.01
"""Probability δ with which the test ever raises an alarm where nothing has changed."""
_BASE_LEVEL = 0.05
# Shares that the test looks for, as parts of the way from the bound to 1.
_PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)


class DriftTest:
    """Whether a share has grown over its bound. Keeps a number for each alternative, however long it runs.

    Args:
        disputed: Accepted pairs of the calibration that were disputed.
        accepted: Accepted pairs of the calibration, at least one.
        level: δ.
    """

    def __init__(self, disputed: int, accepted: int, level: float = LEVEL) -> None:
        self.bound = upper_bound(accepted, disputed, _BASE_LEVEL)
        """Disputed share that the calibration allows (Clopper and Pearson's upper bound at the level 0.05)."""
        self._alternatives = [self.bound + (1 - self.bound) * part for part in _PARTS]
        self._logs = [0.0] * len(_PARTS)
        self._alarm = math.log(len(_PARTS) / level)
        self.drifted = False
        """Whether the alarm was raised, once and for all."""

    def add(self, disputed: bool) -> None:
        """Tell about one more step, drawn from those that were accepted."""
        if self.bound >= 1:
            return  # nothing can be more than that
        for number, share in enumerate(self._alternatives):
            ratio = share / self.bound if disputed else (1 - share) / (1 - self.bound)
            self._logs[number] += math.log(ratio)
        most = max(self._logs)
        total = most + math.log(math.fsum(math.exp(each - most) for each in self._logs))
        self.drifted = self.drifted or total >= self._alarm
