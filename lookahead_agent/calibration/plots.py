"""The picture of whether stated risks are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lookahead_agent.bench.plots import new_figure
from lookahead_agent.calibration.fit import SplitResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NARROW, _WIDTH = 0.3, 0.5


def kept_risks(results: Sequence[SplitResult]) -> Figure:
    """Shares of errors on problems that calibration did not see, by stated risk: a dot for each division.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    figure, ((axes,),) = new_figure(6.0, 3.2)
    for place, result in enumerate(results):
        axes.hlines(result.risk, place - _NARROW, place + _NARROW, colors="#d62728", label=None if place else "stated")
        spread = [place + _WIDTH * ((number + 0.5) / len(result.shares) - 0.5) for number in range(len(result.shares))]
        axes.plot(spread, result.shares, ".", color="#1f77b4", label="measured" if place == 0 else None)
    axes.set_xticks(
        range(len(results)), [f"{each.risk:g}\n{each.certified} of {each.splits}" for each in results], fontsize=8
    )
    axes.set_xlabel("stated risk, and divisions with a threshold that keeps it")
    axes.set_ylabel("share of errors among accepted")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="upper left")
    return figure
