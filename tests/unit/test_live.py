from __future__ import annotations

import io

from rich.console import Console

from lookahead_agent.cli.trace import lanes, live, waits
from lookahead_agent.trace import Bar, Call, timeline
from tests.unit.test_trace import run


def test_a_calls_lanes() -> None:
    bars = [
        Bar("draft", 10.0, 11.0, "accepted", 0, "a"),
        Bar("draft", 11.0, 12.0, "rejected", 1, "b"),
        Bar("target", 10.0, 20.0, "committed", 0, "c"),
        Bar("verifier", 19.9, 20.0, "judged", 0, "a"),
    ]
    text = lanes(Call("planner", "exact", 10.0, 20.0, bars), 110)
    head, draft, target, verifier, _ = text.plain.split("\n")
    assert head == "planner  exact  10.0 s…"
    assert draft == "draft     " + "█" * 20 + " " * 80
    assert target == "target    " + "█" * 100
    assert verifier.endswith("█")
    styles = {str(span.style) for span in text.spans}
    assert {"green", "red", "blue", "yellow"} <= styles


def test_what_was_waited_for() -> None:
    def call(path: str, start: float, end: float, *, critical: bool) -> Call:
        return Call(path, "exact", start, end, critical=critical)

    calls = [call("plan", 0, 2, critical=True), call("a", 2, 3, critical=False), call("b", 2, 6, critical=True)]
    assert waits(calls).plain == "6.0 s, waited for plan 2.0 s → b 4.0 s; several replies at once for 1.0 s (17%)"
    assert "waited for" in lanes(calls[2], 80).plain
    assert "waited for" not in lanes(calls[1], 80).plain
    many = [call(f"node{number}", number, number + 1, critical=True) for number in range(9)]
    assert waits(many).plain.startswith("9.0 s, waited for … → node5 1.0 s → node6 1.0 s → node7 1.0 s → node8 1.0 s;")
    assert waits([]).plain == ""


def test_it_shows_a_run() -> None:
    recorder = run()
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=30)
    with live(recorder, console):
        pass
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for call in timeline(recorder.rows):
        assert call.path is not None
        assert call.path in shown
    assert "2 of 3 steps accepted" in shown
    assert "several replies at once" in " ".join(shown.split())
