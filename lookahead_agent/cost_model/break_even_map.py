"""Where the borders lie: which way of writing is fastest, by c and by what of the draft's steps and tokens is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lookahead_agent.bench.plots import new_figure
from lookahead_agent.cost_model.costs import BatchCosts, MachineCosts
from lookahead_agent.cost_model.estimator import Acceptance, ModeName, best_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: dict[ModeName, str] = {
    "off": "#bbbbbb",
    "sd": "#9ecae1",
    "shared_draft": "#3182bd",
    "lr": "#fdae6b",
    "lr+sd": "#a1d99b",
    "lr+shared_draft": "#31a354",
}
_NAMES: dict[ModeName, str] = {
    "off": "nothing: the target alone",
    "sd": "tokens, guessed by the draft in turn",
    "shared_draft": "tokens from the shared draft",
    "lr": "steps",
    "lr+sd": "steps, tokens in turn",
    "lr+shared_draft": "steps and tokens from the shared draft",
}
_SIMPLER = 1.02
"""A way that needs less is taken within this factor."""
_BY_NEEDS: tuple[ModeName, ...] = ("off", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft")


@dataclass(frozen=True)
class MeasuredPoint:
    """Where a pair of models was found to be.

    Attributes:
        steps: α.
        tokens: α₂.
        c: The cost ratio.
        label: What was measured.
    """

    steps: float
    tokens: float
    c: float
    label: str


@dataclass(frozen=True)
class Cell:
    """The fastest way at one place.

    Attributes:
        steps: α.
        tokens: α₂.
        c: The cost ratio.
        mode: The way.
        speedup: Against the target alone.
    """

    steps: float
    tokens: float
    c: float
    mode: ModeName
    speedup: float


def break_even_map(costs: MachineCosts, ratios: Iterable[float], rates: Sequence[float]) -> list[Cell]:
    """The fastest way at every α and α₂ of a grid, for each cost ratio.

    Args:
        costs: Of batches, on this machine. The draft's are scaled to each cost ratio.
        ratios: Cost ratios c.
        rates: Acceptance rates, of steps and of tokens.
    """
    cells = []
    for c in ratios:
        scaled = _with_ratio(costs, c)
        for steps in rates:
            for tokens in rates:
                settings = {
                    setting.mode: setting.speedup for setting in best_settings(scaled, Acceptance(steps, tokens))
                }
                best = max(settings.values())
                mode = next(mode for mode in _BY_NEEDS if settings[mode] * _SIMPLER >= best)
                cells.append(Cell(steps, tokens, c, mode, settings[mode]))
    return cells


def _with_ratio(costs: MachineCosts, c: float) -> MachineCosts:
    factor = c / costs.c
    draft, alone = (
        BatchCosts(seconds={size: seconds * factor for size, seconds in of.seconds.items()})
        for of in (costs.draft, costs.draft_alone)
    )
    return costs.model_copy(update={"draft": draft, "draft_alone": alone})


def picture(cells: Sequence[Cell], points: Sequence[MeasuredPoint] = ()) -> Figure:
    """A picture of `break_even_map`: one square of α × α₂ for each c, with measured points in the nearest.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    ratios = sorted({cell.c for cell in cells})
    rates = sorted({cell.steps for cell in cells})
    size = rates[1] - rates[0] if len(rates) > 1 else 1.0
    figure, (squares,) = new_figure(3.6 * len(ratios), 4.4, columns=len(ratios))
    from matplotlib.patches import Patch  # it is there, or there were no figure

    for c, axes in zip(ratios, squares, strict=True):
        for cell in cells:
            if cell.c == c:
                corner = cell.steps - size / 2, cell.tokens - size / 2
                axes.add_patch(_square(corner, size, COLOURS[cell.mode]))
                axes.text(cell.steps, cell.tokens, f"{cell.speedup:.1f}", ha="center", va="center", fontsize=6)
        for place, point in enumerate(points):
            beside = (6, -14 if place % 2 else 6)  # two that are close do not hide each other's names
            if min(ratios, key=lambda ratio: abs(ratio - point.c)) == c:
                axes.plot(point.steps, point.tokens, "k*", markersize=11)
                axes.annotate(point.label, (point.steps, point.tokens), beside, textcoords="offset points", fontsize=7)
        axes.set(title=f"c = {c:.2g}", xlabel="α: steps accepted", aspect="equal")
        axes.set(xlim=(rates[0] - size / 2, rates[-1] + size / 2), ylim=(rates[0] - size / 2, rates[-1] + size / 2))
    squares[0].set_ylabel("α₂: draft tokens accepted")
    used = [mode for mode in _BY_NEEDS if any(cell.mode == mode for cell in cells)]
    figure.legend(
        handles=[Patch(color=COLOURS[mode], label=_NAMES[mode]) for mode in used],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure


def _square(corner: tuple[float, float], size: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, size, size, facecolor=colour, edgecolor="white", linewidth=0.4)
