"""Results of `bench synthetic`: measured and predicted speed, as tables and a picture."""

import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lookahead_agent.bench.report import Table, as_markdown, check_report_name, machine_of, versions_of
from lookahead_agent.cost_model.costs import MachineCosts
from lookahead_agent.cost_model.estimator import Acceptance, predicted_speed
from lookahead_agent.cost_model.synthetic import Configuration, SyntheticRow, SyntheticSettings
from lookahead_agent.errors import MissingExtraError
from lookahead_agent.models.cache import writable, write_whole


@dataclass(frozen=True)
class SyntheticResult:
    """Measured and predicted speed of a configuration."""

    config: Configuration
    speed: float  # against the target alone with as many replies at once: median over repeats
    least: float  # the least of them
    most: float  # the largest
    predicted: float | None  # by simulation with the measured costs and the drawn acceptance; None: no costs
    alpha: float | None  # share of the draws that accepted; None: no draw
    late: float  # share of the steps that the target wrote before the draft did
    tokens_per_pass: float  # of the target
    idle: float  # share of the time in which nothing had work


def results(
    rows: Sequence[SyntheticRow], settings: SyntheticSettings, costs: MachineCosts | None
) -> Iterator[SyntheticResult]:
    """Each configuration against the target alone, in the same repeat; `costs` are for the prediction."""
    alone = {(row.replies, row.repeat): row.seconds_per_token for row in rows if row.mode == "off"}
    by_configuration: dict[Configuration, list[SyntheticRow]] = {}
    for row in rows:
        if row.mode != "off":
            by_configuration.setdefault(row.key[0], []).append(row)
    for config, measured in by_configuration.items():
        bases = [alone.get((row.replies, row.repeat)) for row in measured]
        speeds = [base / row.seconds_per_token for row, base in zip(measured, bases, strict=True) if base is not None]
        if not speeds:
            continue
        judged, steps = sum(row.judged for row in measured), sum(row.steps for row in measured)
        generated = sum(sum(row.tokens["target"].values()) for row in measured)
        # The drawn share differs from the probability by chance: the prediction takes the drawn one.
        drawn = sum(row.accepted for row in measured) / judged if judged else None
        acceptance = Acceptance(config.alpha if drawn is None else drawn, settings.token_alpha, settings.step_tokens)
        yield SyntheticResult(
            config,
            statistics.median(speeds),
            min(speeds),
            max(speeds),
            predicted_speed(costs, acceptance, config.mode, config.depth, settings.draft_tokens + 1, config.replies)
            if costs
            else None,
            drawn,
            sum(row.late for row in measured) / steps if steps else 0.0,
            generated / max(sum(row.passes for row in measured), 1),
            statistics.mean(row.idle for row in measured),
        )


def result_table(found: Sequence[SyntheticResult]) -> Table:
    """Measured and predicted speed of each configuration against the target alone."""
    headings = ["mode", "replies", "depth", "α", "drawn", "late", "speed (least to most)"]
    headings += ["predicted", "of predicted", "tokens per pass", "idle"]
    rows = []
    for one in found:
        setting = one.config
        rows.append(
            [
                setting.mode,
                str(setting.replies),
                str(setting.depth or ""),
                f"{setting.alpha:g}" if setting.depth else "",
                f"{one.alpha:.2f}" if one.alpha is not None else "",
                f"{one.late:.0%}" if setting.depth else "",
                f"{one.speed:.2f} ({one.least:.2f} to {one.most:.2f})",
                f"{one.predicted:.2f}" if one.predicted is not None else "",
                f"{one.speed / one.predicted:.2f}" if one.predicted is not None else "",
                f"{one.tokens_per_pass:.2f}",
                f"{one.idle:.1%}",
            ]
        )
    return headings, rows


def write_synthetic_report(
    file: Path, rows: Sequence[SyntheticRow], found: Sequence[SyntheticResult], costs: MachineCosts | None
) -> None:
    """Write a Markdown report, with a picture beside it; `costs` are None where they are not measured."""
    check_report_name(file)
    settings, environment = rows[0].settings, rows[0].environment
    names = settings["models"]
    where = f"{machine_of(environment)}; {versions_of(environment)}"
    parts = [
        f"# Synthetic benchmark: {file.stem}\n",
        f"{names['target']} with {names['draft']}; {where}. Replies of {settings['steps']} steps of "
        f"{settings['step_tokens']} tokens; draft tokens are accepted with probability {settings['token_alpha']:g}, "
        f"{settings['draft_tokens']} for a pass. Speed is of the tokens after the first, against the target alone.\n",
        as_markdown(result_table(found)),
    ]
    if costs is not None:
        parts += [f"c = {costs.c:.2f}.\n", as_markdown(costs.table())]
    svg = file.with_suffix(".svg")
    looked_ahead = any(one.config.depth for one in found)
    if looked_ahead:
        parts.append(f"![speed by depth]({svg.name})\n\n*Speed by depth; dashed: predicted.*\n")
    with writable(file):
        if looked_ahead:
            write_whole(svg, _picture(found))
        write_whole(file, "\n".join(parts))


def _picture(found: Sequence[SyntheticResult]) -> str:
    """Speed by depth as an SVG element, the same for the same results."""
    panels = list(dict.fromkeys((one.config.mode, one.config.replies) for one in found if one.config.depth))
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("pictures need Matplotlib: pip install 'lookahead-agent[bench]'") from error
    figure = Figure(figsize=(3.6 * len(panels), 3.4), layout="constrained")
    squares = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for (mode, replies), axes in zip(panels, squares, strict=True):
        of_panel = [one for one in found if (one.config.mode, one.config.replies) == (mode, replies)]
        for alpha in sorted({one.config.alpha for one in of_panel}):
            line = sorted((one for one in of_panel if one.config.alpha == alpha), key=lambda one: one.config.depth)
            depths = [one.config.depth for one in line]
            spread = [[one.speed - one.least for one in line], [one.most - one.speed for one in line]]
            drawn = axes.errorbar(depths, [one.speed for one in line], spread, marker="o", label=f"α = {alpha:g}")
            known = [(one.config.depth, one.predicted) for one in line if one.predicted is not None]
            if known:
                axes.plot(*zip(*known, strict=True), "--", color=drawn.lines[0].get_color())
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        at_once = f", {replies} at once" if replies > 1 else ""
        axes.set(title=f"{mode}{at_once}", xlabel="steps ahead", xticks=sorted({one.config.depth for one in of_panel}))
        axes.legend(frameon=False, fontsize=8)
    squares[0].set_ylabel("speed against the target alone")
    file = io.StringIO()
    # Text stays text: smaller than outlines, and found by a search.
    with matplotlib.rc_context({"svg.hashsalt": "lookahead-agent", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    return file.getvalue()[file.getvalue().index("<svg") :]
