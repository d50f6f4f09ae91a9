"""`lookahead-agent trace` writes the trace page of a recorded run."""

from pathlib import Path
from typing import Annotated

import typer

from lookahead_agent.cli.terminal import echo
from lookahead_agent.system.files import writable
from lookahead_agent.trace.recorder import read_trace
from lookahead_agent.trace.timeline import timeline, write_page

_OUTPUT = "The page. Default: the same name with .html."


def trace(
    run: Annotated[Path, typer.Argument(help="What `agent --trace run.jsonl` recorded.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help=_OUTPUT)] = None,
) -> None:
    """Write a recorded run as one HTML page."""
    page = output or run.with_suffix(".html")
    rows = read_trace(run)
    calls = timeline(rows)
    with writable(page):
        write_page(calls, page, rows)
    echo(page)
