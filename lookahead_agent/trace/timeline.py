"""Converts recorded rows to calls with bars on lanes, and writes one HTML page that works offline and on a phone."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from lookahead_agent.system.files import write_atomically
from lookahead_agent.trace.node_times import levers, node_times, spans_of

_SHOWN = frozenset({"accepted", "committed", "rejected", "unused", "aborted", "judged"})
_SAME_MOMENT = 0.05
"""Seconds by which a call may start before the end of the one that it waits for, since events arrive late."""
_PLACE = "/*RUN*/"

_FIGURES = (
    *("steps", "accepted", "tokens", "seconds", "speculation_disabled", "target_forward_passes", "usage"),
    *("mode", "mode_reason"),
)
"""Fields of a reply's row that the page shows."""

LANES = ("draft", "target", "verifier")  # lanes in the order of the page


@dataclass
class TimelineBar:
    """The generation or verification of a step; other fields are as in `StepEvent`."""

    lane: str  # one of `LANES`
    start: float  # seconds since the run began, as in `end`
    end: float
    kind: str
    position: int
    text: str
    verdict: str | None = None
    score: float | None = None


@dataclass
class Call:
    """One reply with the bars of its steps."""

    path: str | None  # the node's path through subgraphs; None outside a graph
    policy: str
    start: float  # seconds since the run began, as in `end`
    end: float
    bars: list[TimelineBar] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)  # figures from the metadata; empty for an incomplete reply
    text: str = ""
    critical: bool = False  # whether it is on the critical path: a shorter reply would shorten the run


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
            call.figures = {key: row[key] for key in _FIGURES if key in row}
            call.text = row["text"] or "\n".join(
                f"{tool['name']}({_format_arguments(tool['args'])})" for tool in row["tool_calls"]
            )
        elif row["kind"] in _SHOWN:  # a step has events when it is complete and when it is decided
            lane = "verifier" if row["kind"] == "judged" else row["source"]
            known = {name: row[name] for name in ("kind", "position", "text", "verdict", "score")}
            call.bars.append(TimelineBar(lane, call.start + row["started"], call.start + row["ended"], **known))
    ordered = sorted(calls.values(), key=lambda call: call.start)
    _mark_critical(ordered)
    return ordered


def _mark_critical(calls: Sequence[Call]) -> None:
    """Mark the critical path: the call that ends last, the one that ended last before that began, and so on."""
    candidates = list(calls)
    while candidates:
        last = max(candidates, key=lambda call: call.end)
        last.critical = True
        candidates = [other for other in candidates if other.end <= last.start + _SAME_MOMENT and other is not last]


@dataclass
class ToolRun:
    """A call of a tool with its result."""

    node: str
    name: str
    arguments: str
    result: str | None  # None in traces of earlier versions
    failed: bool
    start: float  # seconds since the run began, as in `end`
    end: float


def _format_arguments(arguments: Any) -> str:
    """Format the arguments of a call, a mapping or its JSON, for a reader: `name="value", other=1`."""
    parsed = arguments
    with suppress(ValueError, TypeError):
        parsed = json.loads(arguments)
    if not isinstance(parsed, dict):
        return str(arguments)
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in parsed.items())


def tool_runs(rows: Iterable[Mapping[str, Any]]) -> list[ToolRun]:
    """Return the tool runs of a trace, in the order in which they began."""
    runs = [
        ToolRun(
            row["path"] or "(no node)",
            row["name"],
            _format_arguments(row["arguments"]),
            row.get("result"),
            row["failed"],
            row["started"],
            row["started"] + row["seconds"],
        )
        for row in rows
        if row["type"] == "tool"
    ]
    return sorted(runs, key=lambda run: run.start)


def page(calls: Sequence[Call], rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """Render the page's HTML, in which models' texts are not markup; `rows` are those of the trace."""
    template = files("lookahead_agent.trace").joinpath("page.html").read_text(encoding="utf-8")
    # "<" becomes a JSON escape, so that no text can end the script element.
    data = json.dumps(_data(calls, rows)).replace("<", "\\u003c")
    return template.replace(_PLACE, data)


def _data(calls: Sequence[Call], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the page shows; its times are those of the run, which includes the time before the first reply."""
    spans, tools = spans_of(rows), tool_runs(rows)
    runs = [row for row in rows if row["type"] == "run"]
    entries: list[Call | ToolRun] = [*calls, *tools]
    starts = [*(entry.start for entry in entries), *(run["started"] for run in runs)]
    ends = [*(entry.end for entry in entries), *(run["started"] + run["seconds"] for run in runs)]
    start, end = min(starts, default=0.0), max(ends, default=0.0)
    before = min(span.start for span in spans) - start if spans else 0.0
    answers = [text for text in (run["answer"] for run in runs) if text] or [call.text for call in calls[-1:]]
    return {
        "calls": [asdict(call) for call in calls],
        "tools": [asdict(run) for run in tools],
        "nodes": [asdict(node) | {"seconds": node.seconds} for node in node_times(spans, end - start, before)],
        "levers": levers(spans),
        "question": next((run["question"] for run in runs if run["question"]), ""),
        "answer": answers[-1] if answers else "",
        "start": start,
        "end": end,
    }


def write_page(calls: Sequence[Call], path: str | Path, rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write the page to a file atomically; raises OSError if the file cannot be written."""
    write_atomically(Path(path), page(calls, rows))
