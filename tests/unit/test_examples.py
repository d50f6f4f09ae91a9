"""Every example runs as it is written, on a model that follows a script."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.testing import scripted_chat
from tests.unit.chat import is_for_a_planner
from tests.unit.conftest import ReplaceChat

EXAMPLES = Path(__file__).parents[2] / "examples"
CALL = '{"name": "calculator", "arguments": {"expression": "12 * 1.50"}}'
ORDER = '<tool_call>{"name": "order", "arguments": {"item": "pen", "number": 12}}</tool_call>'

SEARCH = '<tool_call>{"name": "search_documents", "arguments": {"question": "exact lossless"}}</tool_call>'
SQL = (
    '<tool_call>{"name": "sql", "arguments": {"statement": "SELECT sum(is_correct) FROM replies WHERE policy = '
    "'exact'\"}}</tool_call>"
)


def reply_to(prompt: str) -> str:
    """What a model could say in these graphs."""
    if "You give work" in prompt:
        return '{"librarian": "What does exact promise?", "statistician": "How many were right?"}'
    if "search_documents" in prompt and "You solve" in prompt:
        return "It is lossless." if "tool: " in prompt else SEARCH
    if "CREATE TABLE replies" in prompt and "You solve" in prompt:
        return f"They are {prompt.rpartition('tool: ')[2].split()[1]}." if "tool: " in prompt else SQL
    if "You answer a question from what" in prompt:
        return "23 were right."
    if is_for_a_planner(prompt):
        return "Pens are sold.\n\nPlan:\n1. All pens: 12 * 1.50"
    if "You carry out one step" in prompt:
        return CALL
    if "You write the answer" in prompt:
        return "They cost $18."
    if "You think about how" in prompt:
        return "I order them."
    if "You solve a problem with tools" in prompt:
        return "It is ordered." if "ordered 12" in prompt else ORDER
    if "tools:" in prompt:
        return "It is 391." if "tool: " in prompt else f"<tool_call>{CALL}</tool_call>"
    return "So many.\n\nIt is 36."


SAYS = {
    "first_reply": ["It is 36.", "forward passes of the target]"],
    "per_node_policies": ["mine: 2 steps ahead", "They cost $18."],
    "drop_in_create_agent": ["It is 391."],
    "streaming_steps": ["Plan:", "planner", "finisher"],
    "custom_verifier": ["2 + 2 = 4.\n\nSo it is 4.", "[1 of 2 steps from the draft]"],
    "custom_tool": ["May this call be made?", "It is ordered."],
    "concurrent_users": ["It is 36.\n" * 4],
    "tracing": ["run.html"],
    "changing_questions": ["sums: ", "tales: ", "sums again: ", " ms a token; "],
    "ask_our_docs": ["librarian: It is lossless.", "statistician: They are 23.", "23 were right."],
}


@pytest.mark.parametrize("name", SAYS)
def test_it_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replace_chat: ReplaceChat,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def scripted(**fields: Any) -> Any:
        return scripted_chat(reply_to, **fields)

    replace_chat(scripted)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    for text in SAYS[name]:
        assert text in said


def test_there_is_a_test_of_every_example() -> None:
    # They need servers (tests/integration/test_remote.py) and a data set (test_measure_bfcl.py).
    elsewhere = {"remote_engines", "measure_bfcl"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SAYS.keys() | elsewhere
