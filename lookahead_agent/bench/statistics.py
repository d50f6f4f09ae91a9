"""Estimates with bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead_agent.errors import MissingExtraError

_RESAMPLES = 1000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % confidence interval."""

    value: float  # the figure
    low: float | None = None  # lower end; None: too few samples to tell, as for `high`
    high: float | None = None  # upper end

    def excludes(self, value: float) -> bool:
        """Whether the interval is known and the value lies outside of it."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high

    def shown(self, form: Callable[[float], str], ends: Callable[[float], str] | None = None) -> str:
        """Text such as "0.49 (0.43 to 0.53)"; `ends` formats the interval, if not as `form` does."""
        if self.low is None or self.high is None:
            return form(self.value)
        ends = ends or form
        return f"{form(self.value)} ({ends(self.low)} to {ends(self.high)})"


def estimate(statistic: Callable[..., Any], *columns: Sequence[float]) -> Estimate:
    """A statistic with a bootstrap interval that resamples whole rows, so that pairs stay pairs.

    Args:
        statistic: Takes the columns as arrays, and the axis to reduce.
        columns: Equally long, one entry per problem.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    arrays = [np.asarray(column, dtype=float) for column in columns]
    value = float(statistic(*arrays, axis=-1))
    if len(arrays[0]) < 2:
        return Estimate(value)
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        raise MissingExtraError("reports need SciPy: pip install 'lookahead-agent[bench]'") from error
    # The percentile method, since the others have no answer where all samples are equal.
    found: Any = bootstrap(
        arrays,
        statistic,
        paired=True,
        n_resamples=_RESAMPLES,
        confidence_level=_CONFIDENCE,
        method="percentile",
        rng=0,
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))


def median_ratio(first: Any, second: Any, axis: int = -1) -> Any:
    """The median of first over second, pair by pair."""
    return np.median(first / second, axis=axis)


def mean_difference(first: Any, second: Any, axis: int = -1) -> Any:
    """The mean of the differences."""
    return np.mean(first - second, axis=axis)
