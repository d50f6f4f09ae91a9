"""Pictures of results."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead_agent.bench.samples import Results, Sample
from lookahead_agent.bench.statistics import Estimate
from lookahead_agent.bench.summary import ConfigurationSummary, NodeSummary, by_configuration
from lookahead_agent.errors import MissingExtraError
from lookahead_agent.models.cache import writable, write_whole
from lookahead_agent.plain_text import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = tuple[str, "Figure"]
"""Caption and figure."""

_GREY = "#999999"


def pictures(
    task: str,
    results: Results,
    configurations: Sequence[ConfigurationSummary],
    nodes: Sequence[NodeSummary],
) -> dict[str, Picture]:
    """All pictures of a task, by file name; those without results are left out.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    made: dict[str, Picture] = {}
    configurations = [each for each in configurations if each.task == task]
    if any(each.speedup and each.accuracy for each in configurations):
        made[f"{task}-speedup-accuracy"] = (
            f"{task}: speed and accuracy, with 95 % intervals; up and to the right is better",
            _speedup_against_accuracy(configurations),
        )
    if any(each.acceptance for each in configurations):
        made[f"{task}-acceptance"] = f"{task}: share of steps that the draft wrote", _acceptance(configurations)
    if nodes := [node for node in nodes if node.task == task]:
        made[f"{task}-nodes"] = f"{task}: seconds in the calls of each node", _latency_per_node(nodes)
    alone = [sample for sample in results.samples if sample.task == task and sample.concurrency == 1 and sample.calls]
    if alone:
        own_cpu = {name: turn.own_cpu_seconds for name, turn in results.turns.items()}
        made[f"{task}-profile"] = (
            f"{task}: profile of one reply at a time; verdicts and our own Python run beside the engines",
            _profile(alone, own_cpu),
        )
    return made


def picture_of_tasks(configurations: Sequence[ConfigurationSummary]) -> Picture | None:
    """Several tasks together, each from its slowest configuration to `auto`, or else its fastest; None: of one task.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    tasks: dict[str, list[ConfigurationSummary]] = {}
    for each in configurations:
        if each.accuracy is not None:
            tasks.setdefault(each.task, []).append(each)
    tasks = {name: of_task for name, of_task in tasks.items() if len(of_task) > 1}
    if len(tasks) < 2:
        return None
    figure, ((axes,),) = new_figure(7, 5)
    for number, (name, of_task) in enumerate(tasks.items()):
        slow = max(of_task, key=lambda each: each.seconds)
        fast = min(of_task, key=lambda each: (each.configuration != "auto", each.seconds))
        places = [(each.seconds, 100 * each.accuracy.value) for each in (slow, fast) if each.accuracy is not None]
        colour = f"C{number}"
        axes.annotate("", places[1], places[0], arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1})
        axes.plot(*places[0], "o", color=colour, fillstyle="none")
        axes.plot(*places[1], "o", color=colour, label=f"{name}: {slow.configuration} → {fast.configuration}")
    axes.set_xscale("log", subs=[2, 5])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set(xlabel="seconds per task, median", ylabel="accuracy, %", ylim=(-3, 103))
    _legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    caption = (
        "each task from its slowest configuration (open) to auto, or else its fastest; up and to the left is better"
    )
    return caption, figure


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


def save_svg(file: Path, figure: Figure) -> None:
    """Write a figure.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    with writable(file):
        write_whole(file, as_svg(figure))


def new_figure(
    width: float, height: float, columns: int = 1, rows: int = 1, *, sharey: bool = False
) -> tuple[Figure, Any]:
    """An empty figure, in inches, and its axes, row by row.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("pictures need Matplotlib: pip install 'lookahead-agent[bench]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Axes, **place: Any) -> None:
    axes.legend(fontsize=8, frameon=False, **place)


def _legend_beside(axes: Axes) -> None:
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _speedup_against_accuracy(configurations: Sequence[ConfigurationSummary]) -> Figure:
    figure, ((axes,),) = new_figure(7, 4.2)
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
    axes.axvline(1, color=_GREY, linewidth=0.8, linestyle=":")
    axes.set(xlabel="speed against off (seconds per task; 1 = as fast)", ylabel="accuracy, %", ylim=(-3, 103))
    _legend_beside(axes)
    return figure


def _error(estimate: Estimate, scale: float = 1.0) -> list[list[float]] | None:
    if estimate.low is None or estimate.high is None:
        return None
    ends = estimate.value - estimate.low, estimate.high - estimate.value
    return [[max(0.0, end) * scale] for end in ends]


def _acceptance(configurations: Sequence[ConfigurationSummary]) -> Figure:
    shown = [each for each in configurations if each.mode not in ("off", "sd")]
    figure, ((axes,),) = new_figure(5, 0.45 * len(shown) + 1.6)
    bars = axes.barh([each.configuration for each in shown], [100 * each.acceptance for each in shown], color="C2")
    axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=8)
    axes.set(xlabel="steps from the draft, %", xlim=(0, 105))
    axes.invert_yaxis()
    return figure


def _latency_per_node(nodes: Sequence[NodeSummary]) -> Figure:
    configurations = list(dict.fromkeys(node.configuration for node in nodes))
    figure, ((axes,),) = new_figure(8, 0.5 * len(configurations) + 1.6)
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


def _profile(samples: Sequence[Sample], own_cpu: dict[str, float | None]) -> Figure:
    """Seconds of a reply by their use, for each configuration; below, what runs meanwhile."""
    groups = {name: of_one for (_, name), of_one in by_configuration(samples).items()}
    figure, ((axes,),) = new_figure(8, 0.8 * len(groups) + 1.4)
    for row, of_one in enumerate(groups.values()):
        calls = [call for sample in of_one for call in sample.calls]

        def per_call(seconds: Sequence[float | None], count: int = len(calls)) -> float:
            return sum(each or 0.0 for each in seconds) / count

        first = per_call([call.first_token for call in calls])
        idle = per_call([call.busy.get("waiting") for call in calls])
        writing = max(0.0, per_call([call.seconds for call in calls]) - first - idle)
        for label, seconds, left, colour in (
            ("until the first word", first, 0.0, "#9ecae1"),
            ("engines write", writing, first, "C0"),
            ("nobody has work", idle, first + writing, "#dddddd"),
        ):
            axes.barh(row, seconds, left=left, height=0.42, color=colour, label=label if row == 0 else None)
        for label, seconds, below, colour in (
            ("verdicts", per_call([call.busy.get("verifier") for call in calls]), 0.3, "C4"),
            ("our own Python", per_call([own_cpu.get(sample.turn or "") for sample in of_one]), 0.42, "C3"),
        ):
            axes.barh(row + below, seconds, height=0.12, color=colour, label=label if row == 0 else None)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a reply")
    _legend_beside(axes)
    return figure
