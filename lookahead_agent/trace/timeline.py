"""From recorded rows to calls with bars on lanes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

# Events that are shown: what became of a step, and that it was judged.
_SHOWN = frozenset({"accepted", "committed", "rejected", "unused", "aborted", "judged"})

_SAME_MOMENT = 0.05
"""Seconds by which what waits may seem to begin before what it waits for ends: of both is told a little late."""

LANES = ("draft", "target", "verifier")
"""Who writes or judges, in the order in which they are shown."""


@dataclass
class Bar:
    """Something that took time.

    Attributes:
        lane: One of `LANES`.
        row: Which of the lane's rows it is on: those of one row do not overlap.
        start: In seconds since the run began.
        end: In seconds since the run began.
        fate: "accepted", "committed", "rejected", "unused", "aborted" or "judged".
        position: Which step of the reply it is, from 0.
        text: What was written, or judged.
        verdict: What decided, if the verifier was asked.
        score: The measure that was held against the threshold.
    """

    lane: str
    start: float
    end: float
    fate: str
    position: int
    text: str
    verdict: str | None = None
    score: float | None = None
    row: int = 0


@dataclass
class Call:
    """One reply.

    Attributes:
        path: The node that asked, through subgraphs; None outside a graph.
        policy: Its policy.
        start: When it began, in seconds since the run did.
        end: When it ended.
        bars: What was written and judged for it.
        figures: What the reply's metadata says; empty for a reply that did not come to its end.
        text: The reply.
        critical: Whether the run would have been shorter if it had been: whether nothing that ended later was there to
            wait for.
        row: Which row it is on in a picture of all: those of one row do not overlap.
    """

    path: str | None
    policy: str
    start: float
    end: float
    bars: list[Bar] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    critical: bool = False
    row: int = 0


_Spread = TypeVar("_Spread", Bar, Call)


def lane_of(event: Mapping[str, Any]) -> str:
    """Whose work a step's event is about."""
    return "verifier" if event["kind"] == "judged" else str(event["source"])


def timeline(rows: Iterable[Mapping[str, Any]]) -> list[Call]:
    """The calls of a run, in the order in which they began."""
    calls: dict[str, Call] = {}
    for row in rows:
        if row["type"] == "step":
            _add_step(calls, row)
        elif row["type"] == "reply":
            seconds = row["seconds"]["total"]
            call = calls.setdefault(row["call"], Call(row["path"], row["policy"], row["at"] - seconds, row["at"]))
            call.end = max(call.end, call.start + seconds)
            call.figures = {key: row[key] for key in ("steps", "accepted", "tokens", "seconds", "speculation_disabled")}
            call.text = row["text"] or ", ".join(f"{made['name']}({made['args']})" for made in row["tool_calls"])
    for call in calls.values():
        for lane in LANES:
            _spread([bar for bar in call.bars if bar.lane == lane])
    found = sorted(calls.values(), key=lambda call: call.start)
    _spread(found, _SAME_MOMENT)
    _mark_critical(found)
    return found


def at_once(calls: Iterable[Call]) -> float:
    """Seconds in which several replies were written."""
    edges = sorted(edge for call in calls for edge in ((call.start, 1), (call.end, -1)))
    writing, found = 0, 0.0
    for (at, change), (following, _) in pairwise(edges):
        writing += change
        if writing > 1:
            found += following - at
    return found


def _mark_critical(calls: Sequence[Call]) -> None:
    """Mark the calls that the run's length comes of: the last to end, what ended last before it began, and so on."""
    left = list(calls)
    call = max(left, key=lambda call: call.end, default=None)
    while call is not None:
        call.critical = True
        begun = call.start
        left = [other for other in left if other.end <= begun + _SAME_MOMENT and other is not call]
        call = max(left, key=lambda call: call.end, default=None)


def _add_step(calls: dict[str, Call], row: Mapping[str, Any]) -> None:
    # A step is told of when it is written and again when it is decided; the first event of a call tells when it began.
    call = calls.setdefault(row["call"], Call(row["path"], row["policy"], row["at"] - row["ended"], row["at"]))
    call.end = max(call.end, call.start + row["ended"])
    if row["kind"] not in _SHOWN:
        return
    call.bars.append(
        Bar(
            lane_of(row),
            call.start + row["started"],
            call.start + row["ended"],
            row["kind"],
            row["position"],
            row["text"],
            row["verdict"],
            row["score"],
        )
    )


def _spread(bars: Sequence[_Spread], overlap: float = 1e-9) -> None:
    """Put what overlaps by more than `overlap` seconds on rows of its own."""
    ends: list[float] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        free = next((row for row, end in enumerate(ends) if end <= bar.start + overlap), len(ends))
        ends[free : free + 1] = [bar.end]
        bar.row = free
