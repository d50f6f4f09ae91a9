"""Pictures of results."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lookahead_agent.bench.prediction import Prediction
from lookahead_agent.bench.samples import Results, Sample
from lookahead_agent.bench.small_svg import small_svg
from lookahead_agent.bench.statistics import Estimate
from lookahead_agent.bench.summary import ConfigurationSummary, NodeSummary, by_configuration
from lookahead_agent.errors import MissingExtraError
from lookahead_agent.models.cache import writable, write_whole
from lookahead_agent.plain_text import plain
from lookahead_agent.theory.formulas import asynchronous_speedup, is_draft_bound
from lookahead_agent.trace import LANES, lane_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (
    "#555555",
    "#1f77b4",
    "#2ca02c",
    "#9467bd",
    "#d62728",
    "#ff7f0e",
    "#8c564b",
    "#17becf",
    "#bcbd22",
    "#e377c2",
)
_FATES = {
    "accepted": "#2ca02c",
    "committed": "#1f77b4",
    "rejected": "#d62728",
    "unused": "#c7c7c7",
    "aborted": "#f0a0a0",
    "judged": "#9467bd",
}
_MOST_DEPTH = 16


def pictures(
    task: str,
    results: Results,
    configurations: Sequence[ConfigurationSummary],
    nodes: Sequence[NodeSummary],
    predictions: Sequence[Prediction],
) -> dict[str, tuple[str, Figure]]:
    """All pictures of a task for which there are results: by file name, the caption and the figure.

    Args:
        task: Name of the task.
        results: What was measured, for all tasks, as of the next three.
        configurations: Summary of each way of doing a task.
        nodes: Summary of each node.
        predictions: What theory says.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    made: dict[str, tuple[str, Figure]] = {}
    configurations = [configuration for configuration in configurations if configuration.task == task]
    if any(configuration.speedup and configuration.right for configuration in configurations):
        made[f"{task}-speedup-accuracy"] = (
            f"{task}: speed against right answers, with 95 % intervals; up and to the right is better",
            _speedup_against_accuracy(configurations),
        )
    if any(configuration.acceptance for configuration in configurations):
        made[f"{task}-acceptance"] = (
            f"{task}: share of steps that the draft wrote; where similarities decided, also by threshold",
            _acceptance(configurations, results),
        )
    nodes = [node for node in nodes if node.task == task]
    if nodes:
        made[f"{task}-nodes"] = (f"{task}: seconds in the calls of each node", _latency_per_node(nodes))
    alone = [sample for sample in results.samples if sample.task == task and sample.concurrency == 1 and sample.calls]
    if alone:
        made[f"{task}-profile"] = (
            f"{task}: where the time of a reply goes, one reply at a time; verdicts and our own Python run beside the "
            "engines",
            _profile(alone, {name: turn.own_cpu_seconds for name, turn in results.turns.items()}),
        )
    predictions = [prediction for prediction in predictions if prediction.task == task]
    if len({prediction.depth for prediction in predictions}) > 1:
        made[f"{task}-depth"] = (f"{task}: speed by depth, measured and in theory", _speedup_by_depth(predictions))
    if predictions:
        made[f"{task}-prediction"] = (
            f"{task}: what theory predicts as one measured cause after another is let in, and what was measured",
            _predicted(predictions),
        )
    timelines = [sample for sample in results.samples if sample.task == task and sample.timeline]
    if timelines:
        problem = timelines[0].problem
        first_of_configuration: dict[str, Sample] = {}  # the baseline is measured in each block
        for sample in timelines:
            if sample.problem == problem:
                first_of_configuration.setdefault(sample.configuration, sample)
        made[f"{task}-timeline"] = (
            f"{task}: every step of the problem {problem}; lanes from below: draft, target, verifier",
            _timelines(list(first_of_configuration.values())),
        )
    return made


def picture_of_tasks(configurations: Sequence[ConfigurationSummary]) -> tuple[str, Figure] | None:
    """The caption and a picture of several tasks together, each from its slowest way to `auto`; None: of one task.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    tasks: dict[str, list[ConfigurationSummary]] = {}
    for configuration in configurations:
        if configuration.right is not None:
            tasks.setdefault(configuration.task, []).append(configuration)
    tasks = {name: ways for name, ways in tasks.items() if len(ways) > 1}
    if len(tasks) < 2:
        return None
    figure, ((axes,),) = new_figure(7, 5)
    for number, (name, ways) in enumerate(tasks.items()):
        slow = max(ways, key=lambda configuration: configuration.seconds)
        # What the library chooses by itself, or else what was fastest.
        fast = min(ways, key=lambda configuration: (configuration.configuration != "auto", configuration.seconds))
        places = [
            (configuration.seconds, 100 * configuration.right.value)
            for configuration in (slow, fast)
            if configuration.right is not None
        ]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.annotate("", places[1], places[0], arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1})
        axes.plot(*places[0], "o", color=colour, fillstyle="none")
        axes.plot(*places[1], "o", color=colour, label=f"{name}: {slow.configuration} → {fast.configuration}")
    axes.set_xscale("log", subs=[2, 5])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("seconds per task, median")
    axes.set_ylabel("right answers, %")
    axes.set_ylim(-3, 103)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    _plain(axes)
    return "each task from its slowest way (open) to auto, or else its fastest; up and to the left is better", figure


def as_svg(figure: Figure) -> str:
    """A figure as an SVG element."""
    import matplotlib
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # names of tasks, models and policies are no formulas
        assert isinstance(text, Text)
        text.set_parse_math(False)
        text.set_text(plain(text.get_text()))
    file = io.StringIO()
    # The same results give the same file, in which text is text: smaller than outlines, and found by a search.
    with matplotlib.rc_context({"svg.hashsalt": "lookahead-agent", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    svg = file.getvalue()
    return small_svg(svg[svg.index("<svg") :])


def save_svg(file: Path, figure: Figure) -> None:
    """Write a figure.

    Raises:
        ConfigurationError: It cannot be written there.
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
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def _plain(axes: Axes, along: Literal["x", "y"] = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=along, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _speedup_against_accuracy(configurations: Sequence[ConfigurationSummary]) -> Figure:
    figure, ((axes,),) = new_figure(7, 4.2)
    for number, configuration in enumerate(configurations):
        if configuration.right is None:
            continue
        speed = configuration.speedup or Estimate(1.0)
        colour = _COLOURS[number % len(_COLOURS)]
        axes.errorbar(
            [speed.value],
            [100 * configuration.right.value],
            xerr=_error(speed),
            yerr=_error(configuration.right, 100),
            fmt="o",
            color=colour,
            ecolor=colour,
            elinewidth=1,
            capsize=3,
            label=configuration.configuration,
        )
    axes.axvline(1, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xlabel("speed against off (seconds per task; 1 = as fast)")
    axes.set_ylabel("right answers, %")
    axes.set_ylim(-3, 103)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _plain(axes)
    return figure


def _error(estimate: Estimate, scale: float = 1.0) -> list[list[float]] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return [
        [max(0.0, estimate.value - estimate.low) * scale],
        [max(0.0, estimate.high - estimate.value) * scale],
    ]


def _acceptance(configurations: Sequence[ConfigurationSummary], results: Results) -> Figure:
    shown = [configuration for configuration in configurations if configuration.mode not in ("off", "sd")]
    groups = by_configuration(results.samples)
    scored = {
        configuration.configuration: _scores(groups[configuration.task, configuration.configuration])
        for configuration in shown
    }
    scored = {name: scores for name, scores in scored.items() if len(scores) > 1}
    figure, axes = new_figure(9 if scored else 5, 0.45 * len(shown) + 1.6, columns=2 if scored else 1)
    bars = axes[0][0]
    bars.barh(
        [configuration.configuration for configuration in shown],
        [100 * configuration.acceptance for configuration in shown],
        color="#2ca02c",
    )
    for number, configuration in enumerate(shown):
        bars.text(
            100 * configuration.acceptance + 1, number, f"{configuration.acceptance:.0%}", va="center", fontsize=8
        )
    bars.set_xlim(0, 105)
    bars.invert_yaxis()
    bars.set_xlabel("steps from the draft, %")
    _plain(bars, "x")
    if scored:
        curve = axes[0][1]
        for number, (name, scores) in enumerate(scored.items()):
            ordered = sorted(scores, reverse=True)
            shares = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
            curve.step(ordered, shares, where="post", color=_COLOURS[(number + 1) % len(_COLOURS)], label=name)
        curve.set_xlabel("threshold of the similarity")
        curve.set_ylabel("compared steps above it, %")
        curve.legend(fontsize=8, frameon=False)
        _plain(curve)
    return figure


def _scores(samples: Sequence[Sample]) -> list[float]:
    """Similarities that verdicts went by."""
    return [
        score
        for sample in samples
        for call in sample.calls
        for reason, score in call.times.verdicts
        if score is not None and reason == "similarity"
    ]


def _latency_per_node(nodes: Sequence[NodeSummary]) -> Figure:
    configurations = list(dict.fromkeys(node.configuration for node in nodes))
    names = list(dict.fromkeys(str(node.node) for node in nodes))
    figure, ((axes,),) = new_figure(8, 0.5 * len(configurations) + 1.6)
    left = [0.0] * len(configurations)
    for number, name in enumerate(names):
        seconds = [
            sum(node.seconds for node in nodes if node.configuration == configuration and str(node.node) == name)
            for configuration in configurations
        ]
        axes.barh(configurations, seconds, left=left, label=name, color=_COLOURS[(number + 1) % len(_COLOURS)])
        left = [sum(both) for both in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds in calls, per task (calls at the same time count each)")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _plain(axes, "x")
    return figure


_PARTS = {
    "until the first word": "#9ecae1",
    "engines write": "#1f77b4",
    "nobody has work": "#dddddd",
    "verdicts": "#9467bd",
    "our own Python": "#d62728",
}


def _profile(samples: Sequence[Sample], own: Mapping[str, float | None]) -> Figure:
    """Seconds of a reply by what they go to, for each way; below, what runs meanwhile."""
    by_configuration: dict[str, list[Sample]] = {}
    for sample in samples:
        by_configuration.setdefault(sample.configuration, []).append(sample)
    figure, ((axes,),) = new_figure(8, 0.8 * len(by_configuration) + 1.4)
    for row, of_configuration in enumerate(by_configuration.values()):
        calls = [call for sample in of_configuration for call in sample.calls]
        per_call = 1 / len(calls)
        first = sum(call.first_token or 0.0 for call in calls) * per_call
        idle = sum(call.busy.get("waiting", 0.0) for call in calls) * per_call
        total = sum(call.seconds for call in calls) * per_call
        left = 0.0
        for name, seconds in zip(_PARTS, (first, max(0.0, total - first - idle), idle), strict=False):
            axes.barh(row, seconds, left=left, height=0.42, color=_PARTS[name])
            left += seconds
        verdicts = sum(call.busy.get("verifier", 0.0) for call in calls) * per_call
        known = [spent for sample in of_configuration if (spent := own.get(sample.turn or "")) is not None]
        axes.barh(row + 0.3, verdicts, height=0.12, color=_PARTS["verdicts"])
        axes.barh(row + 0.42, sum(known) * per_call, height=0.12, color=_PARTS["our own Python"])
    for name, colour in _PARTS.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.set_yticks(range(len(by_configuration)), list(by_configuration))
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a reply")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _plain(axes, "x")
    return figure


def _speedup_by_depth(predictions: Sequence[Prediction]) -> Figure:
    figure, ((axes,),) = new_figure(7, 4)
    ordered = sorted(predictions, key=lambda prediction: prediction.depth)
    deepest = ordered[-1]
    depths = list(range(1, min(_MOST_DEPTH, 2 * deepest.depth) + 1))
    c = min(deepest.c, 1.0)
    axes.plot(
        depths,
        [asynchronous_speedup(deepest.alpha, c, depth) for depth in depths],
        color="#999999",
        linestyle="--",
        label=f"formula at α = {deepest.alpha:.2f}, c = {deepest.c:.2f}",
    )
    bound = next((depth for depth in depths if is_draft_bound(c, depth)), None)
    if bound is not None:
        axes.axvline(bound, color="#dddddd", linewidth=0.8)
        axes.text(bound, 0.02, " from here the draft is the limit", fontsize=7, va="bottom", color="#777777")
    at = [prediction.depth for prediction in ordered]
    axes.plot(
        at, [prediction.stages[-1][1] for prediction in ordered], "s:", color="#ff7f0e", label="simulated, all causes"
    )
    axes.plot(at, [prediction.measured for prediction in ordered], "o-", color="#1f77b4", label="measured")
    axes.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("depth γ")
    axes.set_ylabel("tokens per second against off")
    axes.legend(fontsize=8, frameon=False)
    _plain(axes)
    return figure


def _predicted(predictions: Sequence[Prediction]) -> Figure:
    figure, ((axes,),) = new_figure(8, 4)
    for number, prediction in enumerate(predictions):
        names = ["\n".join(_wrapped(name)) for name, _ in prediction.stages] + ["measured"]
        values = [value for _, value in prediction.stages] + [prediction.measured]
        axes.plot(names, values, "o-", color=_COLOURS[(number + 1) % len(_COLOURS)], label=prediction.configuration)
    axes.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens per second against off")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8, frameon=False)
    _plain(axes)
    return figure


def _wrapped(text: str) -> list[str]:
    middle = text.find(" ", len(text) // 2 - 2)
    return [text] if middle < 0 else [text[:middle], text[middle + 1 :]]


def _timelines(samples: Sequence[Sample]) -> Figure:
    figure, rows = new_figure(10, 0.95 * len(samples) + 1.2, rows=len(samples))
    longest = max(sample.seconds for sample in samples)
    for (axes,), sample in zip(rows, samples, strict=True):
        for entry in sample.timeline or ():
            if entry["kind"] not in _FATES:
                continue
            axes.barh(
                LANES.index(lane_of(entry)),
                entry["ended"] - entry["started"],
                left=entry["started"],
                height=0.8,
                color=_FATES[entry["kind"]],
                edgecolor="white",
                linewidth=0.6,
            )
        axes.set_xlim(0, longest * 1.02)
        axes.set_ylim(-0.6, len(LANES) - 0.4)
        axes.set_yticks([])
        axes.set_ylabel(sample.configuration, rotation=0, ha="right", va="center", fontsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=7)
    rows[-1][0].set_xlabel("seconds")
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=fate) for fate, colour in _FATES.items()]
    figure.legend(handles=handles, fontsize=8, frameon=False, ncols=len(handles), loc="outside upper center")
    return figure
