from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cli.trace import trace
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.trace.recorder import TraceRecorder, read_trace
from lookahead_agent.trace.timeline import Call, TimelineBar, page, timeline, write_page
from tests.unit.chat import scripted_chat
from tests.unit.test_policy_choice import graph_of

REPLY = "First this.\n\nThen that.\n\nIt is <script>alert('4')</script>."


def record_run(path: Path | None = None, **nodes: Any) -> TraceRecorder:
    llm = scripted_chat(REPLY, lambda _: REPLY.replace("that", "7"), policy="exact")
    graph = graph_of(llm, **(nodes or {"planner": True, "writer": True}))
    with TraceRecorder(path) as recorder:
        for _ in graph.stream({"messages": [("user", "?")]}, {"callbacks": [recorder]}, stream_mode="messages"):
            continue
    return recorder


def test_timeline_has_a_call_per_node_with_bars_for_its_steps(tmp_path: Path) -> None:
    recorder = record_run(tmp_path / "run.jsonl")
    rows = read_trace(tmp_path / "run.jsonl")
    assert rows == json.loads(json.dumps(recorder.rows))
    calls = timeline(rows)
    assert [call.path for call in calls] == ["planner", "writer"]
    for call in calls:
        assert (call.policy, call.text) == ("exact", REPLY)
        kinds = [bar.kind for bar in sorted(call.bars, key=lambda bar: bar.position) if bar.lane != "verifier"]
        assert kinds.count("accepted") == call.figures["accepted"] == 2
        assert "rejected" in kinds
        assert "committed" in kinds
        kept = [bar for bar in call.bars if bar.kind in ("accepted", "committed")]
        assert "".join(bar.text for bar in sorted(kept, key=lambda bar: bar.position)) == REPLY
        assert any(bar.lane == "verifier" and bar.verdict for bar in call.bars)
        assert all(call.start <= bar.start <= bar.end <= call.end + 1e-6 for bar in call.bars)


def test_truncated_trace_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    record_run(file)
    lines = file.read_text().splitlines()[:-1]  # without the row of the run
    file.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    calls = timeline(read_trace(file))
    assert calls[-1].path == "writer"
    assert calls[-1].figures == {}, "the trace ends before this reply does"
    assert calls[-1].bars


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a trace"),
        ("hello\nyou\n", "line 1 is not JSON"),
        ('{"a": 1}\n{}\n', "not a row of a trace"),
        ('{"type": "trace", "version": 99}\n', "newer version"),
    ],
)
def test_invalid_traces_raise(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_trace(file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_run_has_its_question_answer_and_times() -> None:
    rows = record_run().rows
    (run,) = [row for row in rows if row["type"] == "run"]
    assert (run["question"], run["answer"], run["failed"]) == ("?", REPLY, False)
    ends = [row["at"] for row in rows if "at" in row]
    assert run["started"] < min(ends)
    assert max(ends) <= run["started"] + run["seconds"]


def test_page_is_self_contained_and_escapes_texts() -> None:
    calls = timeline(record_run().rows)
    html = page(calls)
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert "<" not in data
    assert json.loads(data)["calls"][0]["text"] == REPLY
    assert not re.search(r'(src|href)\s*=\s*"', html), "the page loads no other file"
    assert "innerHTML" not in html
    assert page([]).count("<script") == 2


def test_line_separators_and_end_tags_in_texts_are_escaped() -> None:
    call = Call("a", "off", 0.0, 1.0, [TimelineBar("target", 0, 1, "committed", 0, "a\u2028b</script>")])
    html = page([call])
    assert "\u2028" not in html
    assert html.count("</script>") == 2


def test_trace_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path / "run.jsonl")
    trace(tmp_path / "run.jsonl", None)
    assert capsys.readouterr().out.strip() == str(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        trace(tmp_path / "run.jsonl", tmp_path / "run.jsonl" / "run.html")
    trace(tmp_path / "run.jsonl", tmp_path / "new" / "run.html")
    assert (tmp_path / "new" / "run.html").is_file()
    write_page([], tmp_path / "empty.html")


def test_calls_on_the_critical_path_are_marked() -> None:
    def reply(call: str, start: float, end: float) -> dict[str, Any]:
        figures = {"steps": 1, "accepted": 0, "tokens": {}, "speculation_disabled": None, "text": "", "tool_calls": []}
        return figures | {
            "type": "reply", "call": call, "path": call, "policy": "off", "at": end, "seconds": {"total": end - start},
        }  # fmt: skip

    rows = [reply("planner", 0, 4), reply("a", 4, 6), reply("b", 4.0005, 9), reply("c", 6, 7), reply("writer", 9, 10)]
    calls = timeline(rows)
    assert [call.path for call in calls if call.critical] == ["planner", "b", "writer"]
    assert timeline([]) == []
    (only,) = timeline([reply("nothing", 1, 1)])
    assert only.critical


def test_rows_take_their_time_from_the_recorders_clock() -> None:
    ticks = iter(range(1000))
    llm = scripted_chat(REPLY, policy="exact")
    with TraceRecorder(now=lambda: float(next(ticks))) as recorder:
        llm.invoke("?", {"callbacks": [recorder]})
    at = [row["at"] for row in recorder.rows if "at" in row]
    assert at == [float(number) for number in range(1, len(at) + 1)]
