"""From recorded rows to calls with bars on lanes, and to one HTML page that works offline and on a phone."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from lookahead_agent.models.cache import write_whole
from lookahead_agent.trace.node_times import Span, tables

_SHOWN = frozenset({"accepted", "committed", "rejected", "unused", "aborted", "judged"})
_SAME_MOMENT = 0.05
"""Seconds by which a call may seem to begin before the one that it waits for ends: events arrive a little late."""
_PLACE = "/*CALLS*/"

LANES = ("draft", "target", "verifier")  # The lanes in the order in which they are shown


@dataclass
class Bar:
    """The writing or judging of a step; other fields are as in `StepEvent`."""

    lane: str  # one of `LANES`
    start: float  # in seconds since the run began, as `end`
    end: float
    kind: str
    position: int
    text: str
    verdict: str | None = None
    score: float | None = None
    row: int = 0  # of the lane: bars of one row do not overlap


@dataclass
class Call:
    """One reply."""

    path: str | None  # the node that asked, through subgraphs; None outside a graph
    policy: str
    start: float  # in seconds since the run began, as `end`
    end: float
    bars: list[Bar] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)  # of the metadata; empty for a reply without an end
    text: str = ""
    critical: bool = False  # on the critical path: the run would have been shorter with a shorter reply
    row: int = 0  # in a picture of all calls: those of one row do not overlap


_Spread = TypeVar("_Spread", Bar, Call)


def timeline(rows: Iterable[Mapping[str, Any]]) -> list[Call]:
    """The calls of a run, in the order in which they began."""
    calls: dict[str, Call] = {}
    for row in rows:
        if row["type"] not in ("step", "reply"):
            continue
        is_step = row["type"] == "step"
        seconds = row["ended"] if is_step else row["seconds"]["total"]
        # A call's first event has its beginning.
        call = calls.setdefault(row["call"], Call(row["path"], row["policy"], row["at"] - seconds, row["at"]))
        call.end = max(call.end, call.start + seconds)
        if not is_step:
            call.figures = {key: row[key] for key in ("steps", "accepted", "tokens", "seconds", "speculation_disabled")}
            call.text = row["text"] or ", ".join(f"{made['name']}({made['args']})" for made in row["tool_calls"])
        elif row["kind"] in _SHOWN:  # a step has an event when it is written and another when it is decided
            lane = "verifier" if row["kind"] == "judged" else row["source"]
            known = {name: row[name] for name in ("kind", "position", "text", "verdict", "score")}
            call.bars.append(Bar(lane, call.start + row["started"], call.start + row["ended"], **known))
    for call in calls.values():
        for lane in LANES:
            _spread([bar for bar in call.bars if bar.lane == lane])
    found = sorted(calls.values(), key=lambda call: call.start)
    _spread(found, _SAME_MOMENT)
    _mark_critical(found)
    return found


def _mark_critical(calls: Sequence[Call]) -> None:
    """Mark the calls that the run's length comes of: the last to end, what ended last before it began, and so on."""
    left = list(calls)
    while left:
        last = max(left, key=lambda call: call.end)
        last.critical = True
        left = [other for other in left if other.end <= last.start + _SAME_MOMENT and other is not last]


def _spread(bars: Sequence[_Spread], overlap: float = 1e-9) -> None:
    """Put what overlaps by more than `overlap` seconds on rows of its own."""
    ends: list[float] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        free = next((row for row, end in enumerate(ends) if end <= bar.start + overlap), len(ends))
        ends[free : free + 1] = [bar.end]
        bar.row = free


def page(calls: Sequence[Call], spans: Sequence[Span] = ()) -> str:
    """The page's HTML, in which markup of a model's text is text; `spans` are for the tables of times."""
    template = files("lookahead_agent.trace").joinpath("page.html").read_text(encoding="utf-8")
    # No text can end the script element that it is in: "<" is written as an escape of JSON.
    data = json.dumps({"calls": [asdict(call) for call in calls], "tables": tables(spans)}).replace("<", "\\u003c")
    return template.replace(_PLACE, data)


def write_page(calls: Sequence[Call], path: str | Path, spans: Sequence[Span] = ()) -> None:
    """Write the page to a file, with the tables of these spans' times; raises OSError where it cannot be written."""
    write_whole(Path(path), page(calls, spans))
