"""`lookahead-agent trace`: a recorded run as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lookahead_agent.cli.terminal import echo
from lookahead_agent.models.cache import writable
from lookahead_agent.trace import read_trace, spans_of, timeline, write_page


def trace(
    run: Annotated[Path, typer.Argument(help="What `agent --trace run.jsonl` recorded.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page. Default: the same name with .html.")
    ] = None,
) -> None:
    """Write a recorded run as one HTML page."""
    page = output or run.with_suffix(".html")
    rows = read_trace(run)
    calls = timeline(rows)
    with writable(page):
        write_page(calls, page, spans_of(rows))
    echo(page)
