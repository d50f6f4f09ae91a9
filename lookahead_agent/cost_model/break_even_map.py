"""The break-even map: the fastest mode by cost ratio and by acceptance rates of steps and tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lookahead_agent.bench.plots import new_figure
from lookahead_agent.cost_model.costs import BatchCosts, MachineCosts
from lookahead_agent.cost_model.estimator import EVERY, Acceptance, Grid, ModeName, best_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIOS = (0.1, 0.3, 0.5)

_TIE = 1.02
"""A simpler mode is taken within this factor."""
_MODES: dict[ModeName, tuple[str, str]] = {
    "off": ("#bbbbbb", "the target alone"),
    "sd": ("#9ecae1", "draft tokens, in turn"),
    "shared_draft": ("#3182bd", "draft tokens, shared draft"),
    "lr": ("#fdae6b", "steps"),
    "lr+sd": ("#a1d99b", "steps, and draft tokens in turn"),
    "lr+shared_draft": ("#31a354", "steps, and draft tokens of the shared draft"),
}
"""Colour and legend, the simplest first."""


@dataclass(frozen=True)
class Cell:
    """The fastest mode at one place of the map."""

    steps: float  # α
    tokens: float  # α₂
    c: float  # the cost ratio
    mode: ModeName  # the mode
    speedup: float  # against the target alone


def break_even_map(
    costs: MachineCosts, ratios: Iterable[float], rates: Sequence[float], grid: Grid = EVERY
) -> list[Cell]:
    """The fastest mode at every α and α₂, for each cost ratio.

    Args:
        costs: Of the pair on this machine; the draft's are scaled to each cost ratio.
        ratios: Cost ratios c.
        rates: Acceptance rates, of steps and of tokens.
    """
    cells = []
    for c in ratios:
        scaled = _with_ratio(costs, c)
        for steps in rates:
            for tokens in rates:
                found = best_settings(scaled, Acceptance(steps, tokens), grid=grid)
                speed = {setting.mode: setting.speedup for setting in found}
                mode = next(mode for mode in _MODES if speed[mode] * _TIE >= found[0].speedup)
                cells.append(Cell(steps, tokens, c, mode, speed[mode]))
    return cells


def _with_ratio(costs: MachineCosts, c: float) -> MachineCosts:
    factor = c / costs.c
    draft, alone = (
        BatchCosts(seconds={size: seconds * factor for size, seconds in of.seconds.items()})
        for of in (costs.draft, costs.draft_alone)
    )
    return costs.model_copy(update={"draft": draft, "draft_alone": alone})


def picture(cells: Sequence[Cell], c: float = 0.0, points: Mapping[str, Acceptance] | None = None) -> Figure:
    """A picture of `break_even_map`: a square of α × α₂ for each cost ratio.

    Args:
        c: The cost ratio at which the points were measured; they are drawn into the nearest square.
        points: Measured acceptance, by label.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    ratios = sorted({cell.c for cell in cells})
    rates = sorted({cell.steps for cell in cells})
    half = (rates[1] - rates[0] if len(rates) > 1 else 1.0) / 2
    ends = rates[0] - half, rates[-1] + half
    modes = list(_MODES)
    figure, squares = new_figure(3.6 * len(ratios), 4.4, len(ratios))
    from matplotlib.colors import ListedColormap  # it is there, or there were no figure
    from matplotlib.patches import Patch

    for ratio, axes in zip(ratios, squares, strict=True):
        of_ratio = [cell for cell in cells if cell.c == ratio]
        colours = np.empty((len(rates), len(rates)))
        for cell in of_ratio:
            colours[rates.index(cell.tokens), rates.index(cell.steps)] = modes.index(cell.mode)
            axes.text(cell.steps, cell.tokens, f"{cell.speedup:.1f}", ha="center", va="center", fontsize=6)
        colour_map = ListedColormap([colour for colour, _ in _MODES.values()])
        axes.imshow(colours, cmap=colour_map, vmin=-0.5, vmax=len(modes) - 0.5, origin="lower", extent=(*ends, *ends))
        axes.set(title=f"c = {ratio:.2g}", xlabel="α: steps accepted")
    axes = min(zip(ratios, squares, strict=True), key=lambda each: abs(each[0] - c))[1]
    for place, (label, point) in enumerate((points or {}).items()):
        offset = (6, -14 if place % 2 else 6)  # two that are close do not hide each other's labels
        axes.plot(point.steps, point.tokens, "k*", markersize=11)
        axes.annotate(label, (point.steps, point.tokens), offset, textcoords="offset points", fontsize=7)
    squares[0].set_ylabel("α₂: draft tokens accepted")
    used = [mode for mode in modes if any(cell.mode == mode for cell in cells)]
    figure.legend(
        handles=[Patch(color=_MODES[mode][0], label=_MODES[mode][1]) for mode in used],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure
