"""A run's trace: its lanes in the terminal while it runs, and `lookahead-agent trace`, which writes it as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from lookahead_agent.cli.terminal import echo
from lookahead_agent.models.cache import writable
from lookahead_agent.trace import (
    LANES,
    Bar,
    Call,
    TraceRecorder,
    concurrency,
    read_trace,
    spans_of,
    timeline,
    write_page,
)

# The page's colours, as near as terminals have them.
_STYLES = {
    "accepted": "green",
    "committed": "blue",
    "rejected": "red",
    "unused": "bright_blue",
    "aborted": "bright_black",
    "judged": "yellow",
}
_LABEL = 10
_LINKS = 4
"""Of the chain of replies that were waited for, the last that are named."""


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


@contextmanager
def live(recorder: TraceRecorder, console: Console) -> Iterator[None]:
    """Show what a recorder has, until the context ends; then it stays as it is."""

    def render() -> RenderableType:
        # A few rows for each call: those that fit the window, the last ones.
        calls = timeline(list(recorder.rows))
        shown = calls[-max(1, (console.height - 5) // 5) :]
        return Group(_legend(), waits(calls), *(lanes(call, console.width) for call in shown))

    with Live(get_renderable=render, console=console, refresh_per_second=4, transient=False):
        yield


def waits(calls: Sequence[Call]) -> Text:
    """What the run's length comes of so far, and how much of it was in parallel."""
    if not calls:
        return Text()
    whole = max(call.end for call in calls) - min(call.start for call in calls)
    chain = [f"{call.path or '(no node)'} {call.end - call.start:.1f} s" for call in calls if call.critical]
    named = " → ".join((["…"] if len(chain) > _LINKS else []) + chain[-_LINKS:])
    _, several = concurrency((call.start, call.end) for call in calls)
    share = f"{several / whole:.0%}" if whole else "0%"
    return Text(
        f"{whole:.1f} s, waited for {named}; several replies at once for {several:.1f} s ({share})",
        style="bright_black",
    )


def lanes(call: Call, width: int) -> Text:
    """A call's lanes, as wide as the terminal."""
    text = Text(no_wrap=True, overflow="crop")
    text.append(call.path or "(no node)", style="bold")
    accepted = f", {call.figures['accepted']} of {call.figures['steps']} steps accepted" if call.figures else "…"
    text.append(f"  {call.policy}  {call.end - call.start:.1f} s{accepted}", style="bright_black")
    text.append("  waited for\n" if call.critical else "\n", style="bold blue")
    cells = max(10, width - _LABEL)
    for lane in LANES:
        text.append(f"{lane:<{_LABEL}}", style="bright_black")
        for style in _cells(call, [bar for bar in call.bars if bar.lane == lane], cells):
            text.append("█" if style else " ", style=style or "")
        text.append("\n")
    return text


def _cells(call: Call, bars: list[Bar], count: int) -> list[str | None]:
    """The style of each cell; what was kept covers what was not."""
    length = max(call.end - call.start, 1e-6)
    found: list[str | None] = [None] * count
    order = list(_STYLES)
    for bar in sorted(bars, key=lambda bar: -order.index(bar.kind)):
        first = min(count - 1, int((bar.start - call.start) / length * count))
        last = min(count, max(first + 1, round((bar.end - call.start) / length * count)))
        found[first:last] = [_STYLES[bar.kind]] * (last - first)
    return found


def _legend() -> Text:
    names = ("accepted", "target's", "rejected", "not needed", "aborted", "judged")
    text = Text()
    for (_, style), name in zip(_STYLES.items(), names, strict=True):
        text.append("█ ", style=style)
        text.append(f"{name}  ", style="bright_black")
    return text
