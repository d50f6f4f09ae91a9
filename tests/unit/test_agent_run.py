"""Output of `lookahead-agent agent` during a run, and its approval prompts."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from lookahead_agent.agents.middleware import standard_middleware
from lookahead_agent.cli.agent_run import (
    ApprovalNeededError,
    RunResult,
    RunView,
    explain_speed,
    node_table,
    other_times,
    run_graph,
)
from lookahead_agent.cli.terminal import Terminal
from lookahead_agent.runtime.engine_set import NO_DRAFT
from lookahead_agent.testing import scripted_chat, scripted_replies
from tools.calculator import calculator

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 1.5"}}</tool_call>'
QUESTION = {"messages": [HumanMessage("What do 12 pens cost?")]}


class Screen:
    """A terminal with readable output."""

    def __init__(self, width: int = 80) -> None:
        self.file = io.StringIO()
        self.terminal = Terminal(file=self.file, width=width)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip(" ─") for line in self.file.getvalue().splitlines()]


def agent_of(*replies: str, ask_before: Sequence[str] = ()) -> Any:
    llm = scripted_chat(scripted_replies(**{"": list(replies)}))
    middleware = standard_middleware(llm, [calculator], ask_before=ask_before)
    return create_agent(llm, [calculator], middleware=middleware, checkpointer=InMemorySaver())


def scripted_input(*lines: str) -> Callable[[], str]:
    left = iter(lines)

    def ask() -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return ask


def run(graph: Any, start: Any = QUESTION, *inputs: str, screen: Screen | None = None) -> RunResult:
    return run_graph(graph, start, "t", (screen or Screen()).terminal, ask=scripted_input(*inputs))


def test_calls_are_shown_with_results_and_the_last_message_is_the_answer() -> None:
    screen = Screen()
    finished = run(agent_of(CALL, "They cost 18."), screen=screen)
    assert screen.lines == ["tools", '[1] calculator(expression="12 * 1.5")', "18", "actor", "They cost 18."]
    assert finished.answer == "They cost 18."
    assert [message.type for message in finished.messages] == ["human", "ai", "tool", "ai"]


def test_run_prompts_for_an_approval_and_continues(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    finished = run(agent_of(CALL, "They cost 18.", ask_before=["calculator"]), QUESTION, "yes", screen=screen)
    assert 'May calculator(expression="12 * 1.5") be called?' in capsys.readouterr().err
    assert screen.lines == ["tools", '[1] calculator(expression="12 * 1.5")', "18", "actor", "They cost 18."]
    assert finished.answer == "They cost 18."


@pytest.mark.parametrize(("answer", "reason"), [("", "."), ("no", "."), ("ask Ann first", ": ask Ann first")])
def test_rejected_call_becomes_an_error_with_the_reason(answer: str, reason: str) -> None:
    finished = run(agent_of(CALL, "I may not.", ask_before=["calculator"]), QUESTION, answer)
    (rejected,) = [message for message in finished.messages if isinstance(message, ToolMessage)]
    assert rejected.status == "error"
    assert f"The user does not want this call{reason}" in rejected.text
    assert finished.answer == "I may not."


def test_run_that_ends_before_an_approval_can_be_resumed() -> None:
    graph = agent_of(CALL, "They cost 18.", ask_before=["calculator"])
    with pytest.raises(ApprovalNeededError, match="whether calculator may be called: resume with --thread t"):
        run(graph)
    screen = Screen()
    assert run(graph, None, "y", screen=screen).answer == "They cost 18."
    assert screen.lines[1] == '[1] calculator(expression="12 * 1.5")', "the pending call runs after its approval"


def test_live_shows_steps_instead_of_replies() -> None:
    screen = Screen()
    finished = run_graph(agent_of(CALL, "They cost 18."), QUESTION, "t", screen.terminal, live=True)
    assert finished.answer == "They cost 18."
    assert "actor  step 1: draft accepted, same text, 0.0 s  They cost 18." in screen.lines
    assert any(line.startswith("[1] calculator(") for line in screen.lines)
    assert "actor" not in screen.lines


def test_concurrent_replies_are_shown_one_after_the_other() -> None:
    screen = Screen()
    view = RunView(screen.terminal)
    for reply, text in (("a", "One "), ("b", "Three "), ("a", "two."), ("c", "Five."), ("b", "four.")):
        view.piece(AIMessageChunk(text, id=reply, chunk_position="last" if text.endswith(".") else None))
    view.update({"tools": {"messages": [ToolMessage("x" * 5000, tool_call_id="1", name="t")]}, "other": None})
    assert screen.lines[:5] == ["model", "One two.", "Three four.", "Five.", "tools"]
    assert screen.lines[5] == "[1] t"
    assert "… (cut: 2,000 of 5,000 characters; the run has the rest)" in screen.file.getvalue()


def test_escape_sequences_in_replies_are_removed() -> None:
    screen = Screen()
    run(agent_of(CALL, "It is \x1b[2J\x1b]0;x\x0718[/bold]."), screen=screen)
    assert "\x1b" not in screen.file.getvalue()
    assert screen.lines[-1] == "It is 18[/bold]."


def report(mode: str, policy: str = "balanced", **changes: Any) -> tuple[AIMessage, dict[str, Any]]:
    usage: Any = {"input_tokens": 1, "output_tokens": 30, "total_tokens": 31}
    engines = {"speculation_method": "draft_model", "precision": {"target": "int8"}}
    fields = {"mode": mode, "policy": policy, "mode_reason": f"of {policy}", "speculation_disabled": None}
    return AIMessage("", usage_metadata=usage), fields | {"engines": engines, "target_forward_passes": 15} | changes


@pytest.mark.parametrize(
    ("replies", "lines"),
    [
        ([], [""]),
        ([report("lr", engines={})], [""]),
        (
            [report("lr+sd"), report("sd", "off")],
            ["Replies are fast by int8 weights and draft tokens by draft_model, 2.0"],
        ),
        (
            [report("sd"), report("sd", "off")],
            [
                "No draft steps in this run: this configuration drafts tokens, in the target's engine (of balanced).",
                "Replies are fast by",
            ],
        ),
        (
            [report("off", speculation_disabled="no judge", engines={"precision": {"target": "bf16"}})],
            ["No draft steps in this run: the target writes alone (no judge)."],
        ),
        (
            [report("sd", mode_reason=NO_DRAFT)],
            [
                "No draft steps in this run: this configuration drafts tokens, in the target's engine.",
                "Replies are fast by",
            ],
        ),
        ([report("off", "off", engines={})], ["No draft steps in this run: the target writes alone (of off)."]),
    ],
)
def test_run_says_why_it_has_no_draft_steps_and_what_made_it_fast(replies: list[Any], lines: list[str]) -> None:
    shown = explain_speed(replies).split("\n")
    assert len(shown) == len(lines)
    assert all(line.startswith(expected) for line, expected in zip(shown, lines, strict=True)), shown


def test_node_table_has_rows_for_the_time_of_tools_and_of_the_graph() -> None:
    row: dict[str, Any] = {
        "path": "model",
        "step": 1,
        "policy": "off",
        "steps": 0,
        "accepted": 0,
        "target_forward_passes": 1,
    }
    reply = row | {"type": "reply", "prompt_tokens": {"target": {"total": 3, "cached": 0}}, "usage": None}
    seconds = {"total": 2.0, "prompt": 0.5, "writing": 1.5, "waiting": 0.0}
    rows: list[dict[str, Any]] = [
        {"type": "trace"},
        reply | {"at": 8.0, "seconds": seconds},
        {"type": "tool", "path": "tools", "step": 2, "started": 8.5, "seconds": 3.0},
        reply | {"at": 14.0, "seconds": seconds},
        {"type": "run", "started": 5.0, "seconds": 99.0},  # with the time of an approval
    ]
    others = other_times(rows, 10.0)
    assert others == [("(tools)", 3.0), ("(before)", 1.0), ("(between)", 2.0)]
    assert other_times(rows[:1], 10.0) == []
    screen = Screen()
    finished = run(agent_of(CALL, "They cost 18."))
    assert all(name in ("(tools)", "(before)", "(between)") for name, _ in finished.others)
    screen.terminal.print(node_table(finished.metrics.nodes(), others))
    assert [line.split() for line in screen.lines[-3:]] == [
        ["(tools)", "3.0"],
        ["(before)", "1.0"],
        ["(between)", "2.0"],
    ]


def test_node_table_fits_80_columns() -> None:
    screen = Screen()
    finished = run(agent_of(CALL, "They cost 18."))
    (node,) = finished.metrics.nodes()
    screen.terminal.print(node_table([node | {"node": "search_documents_expert:finisher", "output_tokens": 123_456}]))
    heading, *rows = screen.file.getvalue().splitlines()
    assert " ".join(heading.split()) == "node policy calls steps tokens a pass cached prompt total"
    assert all(len(line) <= 80 for line in (heading, *rows))
    assert "123456" in rows[0]
