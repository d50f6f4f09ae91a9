from __future__ import annotations

import io

from rich.console import Console

from lookahead_agent.cli.live import lanes, live
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
