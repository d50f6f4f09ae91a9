"""Figures with the range that chance alone leaves them in."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead_agent.errors import MissingExtraError

_RESAMPLES = 1000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % confidence interval.

    Attributes:
        value: The figure.
        low: Lower end; None: too few samples to tell, as of `high`.
        high: Upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def excludes(self, value: float) -> bool:
        """Whether the interval is known and the value lies outside of it."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high

    def shown(self, form: Callable[[float], str], ends: Callable[[float], str] | None = None) -> str:
        """As people read it: "0.49 (0.43 to 0.53)".

        Args:
            form: Of the figure.
            ends: Of the interval's ends; None: as the figure.
        """
        if self.low is None or self.high is None:
            return form(self.value)
        ends = ends or form
        return f"{form(self.value)} ({ends(self.low)} to {ends(self.high)})"


def estimate(statistic: Callable[..., float], *columns: Sequence[float]) -> Estimate:
    """A figure of samples, with a bootstrap interval that resamples whole rows, so that pairs stay pairs.

    Args:
        statistic: Of the columns.
        columns: Equally long, one entry per sample.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    value = statistic(*columns)
    if len(columns[0]) < 2:
        return Estimate(value)
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        raise MissingExtraError("reports need SciPy: pip install 'lookahead-agent[bench]'") from error
    # The percentile method, since the others have no answer where all samples are equal.
    found: Any = bootstrap(
        columns,
        lambda *resampled: statistic(*resampled),
        paired=True,
        vectorized=False,
        n_resamples=_RESAMPLES,
        confidence_level=_CONFIDENCE,
        method="percentile",
        rng=0,
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if len(values) else 0.0


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """The median of first over second, pair by pair."""
    return float(statistics.median(a / b for a, b in zip(first, second, strict=True)))


def difference(first: Sequence[float], second: Sequence[float]) -> float:
    """The difference of the means."""
    return mean(first) - mean(second)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of the others is not above; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
