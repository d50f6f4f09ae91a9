"""Pictures of results."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lookahead_agent.bench.summary import ConfigurationSummary, Estimate, NodeSummary
from lookahead_agent.errors import MissingExtraError
from lookahead_agent.plain_text import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = tuple[str, "Figure"]
"""Caption and figure."""


def pictures(
    task: str, configurations: Sequence[ConfigurationSummary], nodes: Sequence[NodeSummary]
) -> dict[str, Picture]:
    """All pictures of a task, by file name; those without results are left out."""
    made: dict[str, Picture] = {}
    configurations = [each for each in configurations if each.task == task]
    if any(each.speedup and each.accuracy for each in configurations):
        made[f"{task}-speedup-accuracy"] = (
            f"{task}: speed and accuracy, with 95 % intervals; up and to the right is better",
            _speedup_against_accuracy(configurations),
        )
    if nodes := [node for node in nodes if node.task == task]:
        made[f"{task}-nodes"] = f"{task}: seconds in the calls of each node", _latency_per_node(nodes)
    return made


def as_svg(figure: Figure) -> str:
    """A figure as an SVG element, the same for the same figure."""
    import matplotlib
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # names of tasks, models and policies are no formulas
        assert isinstance(text, Text)
        text.set_parse_math(False)
        text.set_text(plain(text.get_text()))
    file = io.StringIO()
    # Text stays text: smaller than outlines, and found by a search.
    with matplotlib.rc_context({"svg.hashsalt": "lookahead-agent", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    svg = file.getvalue()
    return svg[svg.index("<svg") :]


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure, in inches, and its axes side by side, which share their y-axis."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("pictures need Matplotlib: pip install 'lookahead-agent[bench]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False, sharey=True).flat)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend_beside(axes: Axes) -> None:
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _speedup_against_accuracy(configurations: Sequence[ConfigurationSummary]) -> Figure:
    figure, (axes,) = new_figure(7, 4.2)
    for each in configurations:
        if each.accuracy is None:
            continue
        speed = each.speedup or Estimate(1.0)
        axes.errorbar(
            speed.value,
            100 * each.accuracy.value,
            xerr=_error(speed),
            yerr=_error(each.accuracy, 100),
            fmt="o",
            elinewidth=1,
            capsize=3,
            label=each.configuration,
        )
    axes.axvline(1, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(xlabel="speed against off (seconds per task; 1 = as fast)", ylabel="accuracy, %", ylim=(-3, 103))
    _legend_beside(axes)
    return figure


def _error(estimate: Estimate, scale: float = 1.0) -> list[list[float]] | None:
    if estimate.low is None or estimate.high is None:
        return None
    ends = estimate.value - estimate.low, estimate.high - estimate.value
    return [[max(0.0, end) * scale] for end in ends]


def _latency_per_node(nodes: Sequence[NodeSummary]) -> Figure:
    configurations = list(dict.fromkeys(node.configuration for node in nodes))
    figure, (axes,) = new_figure(8, 0.5 * len(configurations) + 1.6)
    left = [0.0] * len(configurations)
    for name in dict.fromkeys(str(node.node) for node in nodes):
        of_node = [node for node in nodes if str(node.node) == name]
        seconds = [sum(node.seconds for node in of_node if node.configuration == each) for each in configurations]
        axes.barh(configurations, seconds, left=left, label=name)
        left = [sum(both) for both in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds in calls, per task (calls at the same time count each)")
    _legend_beside(axes)
    return figure
