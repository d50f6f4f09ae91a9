"""`lookahead-agent bench report` and `bench compare`: results on the terminal and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lookahead_agent.bench.comparison import changes
from lookahead_agent.bench.report import Report
from lookahead_agent.bench.samples import Results, read_results
from lookahead_agent.cli.terminal import Terminal, as_rich
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.jsonl import RowFile

_WIDE = 240


def report(
    files: Annotated[list[Path], typer.Argument(help="Results of `bench`; several are taken together.")],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", help="Also write it: .md with pictures, .csv, or .html in one page. Repeatable."
        ),
    ] = None,
) -> None:
    """Show results as tables, and write them as Markdown, CSV or one HTML page."""
    made = Report(_read(*files))
    for file in output or ():
        made.write(file)
        Terminal(stderr=True).print(f"{file}", soft_wrap=True)
    _show(made)


def compare(
    first: Annotated[Path, typer.Argument(help="Results.")],
    second: Annotated[Path, typer.Argument(help="Later results.")],
) -> None:
    """Show the changes from one file of results to another, and whether they are more than noise."""
    rows = [
        [
            change.task,
            change.configuration,
            str(change.samples),
            change.speed.shown("{:.2f}".format),
            change.accuracy.shown("{:+.2f}".format) if change.accuracy else "",
            change.acceptance.shown("{:+.2f}".format),
            ", ".join(change.verdicts()) or "within the noise",
        ]
        for change in changes(_read(first), _read(second))
    ]
    headings = ["task", "configuration", "samples", "speed", "accuracy", "accepted", ""]
    Terminal(width=_WIDE).print(as_rich((headings, rows), words=("configuration", ""), no_wrap=True))


def show_summary(results: Results) -> None:
    """Show the tables of results on the terminal."""
    _show(Report(results))


def _read(*files: Path) -> Results:
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ConfigurationError(f"there is no file {', '.join(missing)}")
    return read_results(row for file in files for row in RowFile(file).rows)


def _show(made: Report) -> None:
    show = Terminal(width=_WIDE)
    show.print(made.conditions())
    for task in made.tasks:
        show.print(f"\n{task}", style="bold")
        for table in made.tables(task):
            show.print(as_rich(table, no_wrap=True))
