"""Converts recorded rows to calls with bars on lanes, and writes one HTML page that works offline and on a phone."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from lookahead_agent.models.cache import write_atomically
from lookahead_agent.trace.node_times import Span, tables

_SHOWN = frozenset({"accepted", "committed", "rejected", "unused", "aborted", "judged"})
_SAME_MOMENT = 0.05
"""Seconds by which a call may start before the end of the one that it waits for, since events arrive late."""
_PLACE = "/*CALLS*/"

LANES = ("draft", "target", "verifier")  # In the order in which the page shows them


@dataclass
class Bar:
    """The generation or verification of a step; other fields are as in `StepEvent`."""

    lane: str  # one of `LANES`
    start: float  # in seconds since the run began, like `end`
    end: float
    kind: str
    position: int
    text: str
    verdict: str | None = None
    score: float | None = None
    row: int = 0  # within the lane: bars of a row do not overlap


@dataclass
class Call:
    """One reply with the bars of its steps."""

    path: str | None  # the node's path through subgraphs; None outside a graph
    policy: str
    start: float  # in seconds since the run began, like `end`
    end: float
    bars: list[Bar] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)  # from the metadata; empty for an incomplete reply
    text: str = ""
    critical: bool = False  # on the critical path: a shorter reply would shorten the run
    row: int = 0  # in the overview of all calls: calls of a row do not overlap


_Spread = TypeVar("_Spread", Bar, Call)


def timeline(rows: Iterable[Mapping[str, Any]]) -> list[Call]:
    """Build the calls of a run, in the order in which they began."""
    calls: dict[str, Call] = {}
    for row in rows:
        if row["type"] not in ("step", "reply"):
            continue
        is_step = row["type"] == "step"
        seconds = row["ended"] if is_step else row["seconds"]["total"]
        # The first event of a call gives its start.
        call = calls.setdefault(row["call"], Call(row["path"], row["policy"], row["at"] - seconds, row["at"]))
        call.end = max(call.end, call.start + seconds)
        if not is_step:
            call.figures = {key: row[key] for key in ("steps", "accepted", "tokens", "seconds", "speculation_disabled")}
            call.text = row["text"] or ", ".join(f"{tool['name']}({tool['args']})" for tool in row["tool_calls"])
        elif row["kind"] in _SHOWN:  # a step has events when it is complete and when it is decided
            lane = "verifier" if row["kind"] == "judged" else row["source"]
            known = {name: row[name] for name in ("kind", "position", "text", "verdict", "score")}
            call.bars.append(Bar(lane, call.start + row["started"], call.start + row["ended"], **known))
    for call in calls.values():
        for lane in LANES:
            _spread([bar for bar in call.bars if bar.lane == lane])
    ordered = sorted(calls.values(), key=lambda call: call.start)
    _spread(ordered, _SAME_MOMENT)
    _mark_critical(ordered)
    return ordered


def _mark_critical(calls: Sequence[Call]) -> None:
    """Mark the critical path: the call that ends last, the one that ended last before that began, and so on."""
    candidates = list(calls)
    while candidates:
        last = max(candidates, key=lambda call: call.end)
        last.critical = True
        candidates = [other for other in candidates if other.end <= last.start + _SAME_MOMENT and other is not last]


def _spread(bars: Sequence[_Spread], overlap: float = 1e-9) -> None:
    """Assign rows so that no two bars or calls of a row overlap by more than `overlap` seconds."""
    ends: list[float] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        free = next((row for row, end in enumerate(ends) if end <= bar.start + overlap), len(ends))
        ends[free : free + 1] = [bar.end]
        bar.row = free


def page(calls: Sequence[Call], spans: Sequence[Span] = ()) -> str:
    """Render the page's HTML, in which models' texts are not markup; `spans` fill the tables of times."""
    template = files("lookahead_agent.trace").joinpath("page.html").read_text(encoding="utf-8")
    # "<" becomes a JSON escape, so that no text can end the script element.
    data = json.dumps({"calls": [asdict(call) for call in calls], "tables": tables(spans)}).replace("<", "\\u003c")
    return template.replace(_PLACE, data)


def write_page(calls: Sequence[Call], path: str | Path, spans: Sequence[Span] = ()) -> None:
    """Write the page to a file atomically; raises OSError if the file cannot be written."""
    write_atomically(Path(path), page(calls, spans))
