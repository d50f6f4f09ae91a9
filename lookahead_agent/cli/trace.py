"""A run's trace: its steps in the terminal while it runs, and `lookahead-agent trace`, which writes it as a page."""

from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.callbacks import BaseCallbackHandler
from rich.text import Text

from lookahead_agent.cli.terminal import Terminal, echo
from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.models.cache import writable
from lookahead_agent.trace.node_times import spans_of
from lookahead_agent.trace.recorder import read_trace
from lookahead_agent.trace.timeline import timeline, write_page

# The page's colours, as near as terminals have them.
_STYLES = {
    "accepted": "green",
    "committed": "blue",
    "rejected": "red",
    "unused": "bright_blue",
    "aborted": "bright_black",
    "judged": "yellow",
}
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
        write_page(calls, page, spans_of(rows))
    echo(page)


class LiveSteps(BaseCallbackHandler):
    """Shows a line for each thing that happens to a step: who wrote or judged it, how long that took, and its text."""

    def __init__(self, show: Terminal) -> None:
        self._show = show

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        """Show what happened to a step."""
        if name != STEP_EVENT or data["kind"] not in _STYLES:
            return
        who = "verifier" if data["kind"] == "judged" else data["source"]
        verdict = f", {data['verdict']}" if data["verdict"] else ""
        line = Text.assemble(
            (f"{data['path'] or '(no node)'}  ", "bold"),
            (f"step {data['position'] + 1}: {who} {data['kind']}", _STYLES[data["kind"]]),
            (f"{verdict}, {data['ended'] - data['started']:.1f} s  ", "bright_black"),
            " ".join(data["text"].split()),
        )
        self._show.print(line, no_wrap=True, overflow="ellipsis")
