"""Every example runs unchanged on a scripted model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.testing import scripted_chat
from tests.unit.conftest import ReplaceChat

EXAMPLES = Path(__file__).parents[2] / "examples"
CALL = '{"name": "calculator", "arguments": {"expression": "12 * 1.50"}}'
ORDER = '{"name": "order", "arguments": {"item": "pen", "number": 12}}'
SEARCH = '{"name": "search_documents", "arguments": {"question": "exact lossless"}}'
SQL = '{"name": "sql", "arguments": {"statement": "SELECT sum(is_correct) FROM replies WHERE policy = \'exact\'"}}'
WRITE = '{"name": "write_file", "arguments": {"file_path": "/result.txt", "content": "391"}}'
READY = '{"name": "ready_to_answer", "arguments": {}}'
TASKS = [
    '{"name": "librarian", "arguments": {"task": "What does exact promise?"}}',
    '{"name": "statistician", "arguments": {"task": "How many were right?"}}',
]


def reply_to(prompt: str) -> str:
    """Return a plausible reply to a prompt of these graphs."""
    results = prompt.rpartition("Results so far:")[2]
    if "You lead specialists" in prompt:
        return next((task for number, task in enumerate(TASKS, 1) if f"[{number}]" not in results), READY)
    if "You carry out a task with tools" in prompt:
        if "[1]" in results:
            return READY
        return (
            ORDER
            if "order(" in prompt or "Order 12" in prompt
            else SEARCH
            if "Your task: What does exact" in prompt
            else SQL
        )
    if "You answer a question from what specialists" in prompt:
        return "23 were right."
    if "You answer a question from the results of tool calls" in prompt:
        return "They cost $18."
    if "You answer a question from the results" in prompt:
        result = prompt.rpartition("Results:")[2]
        if "ordered 12" in result:
            return "It is ordered."
        return (
            "It is lossless."
            if "search_documents(" in result
            else f"They are {result.removesuffix('assistant: ').split()[-1]}."
        )
    if "You solve problems with tools" in prompt:
        return 'Pens are sold.\n\nPlan:\n1. calculator("12 * 1.50")'
    if "You think for an assistant" in prompt:
        return "I do my task."
    if "write the result into a file" in prompt:
        calls = [f"<tool_call>{call}</tool_call>" for call in (CALL, WRITE)]
        return [*calls, "It is 391, as the file says."][min(prompt.count("tool: "), 2)]
    if "tools:" in prompt:
        return "It is 391." if "tool: " in prompt else f"<tool_call>{CALL}</tool_call>"
    return "So many.\n\nIt is 36."


EXPECTED = {
    "first_reply": ["It is 36.", "forward passes of the target]"],
    "per_node_policies": ["mine: 2 steps ahead", "They cost $18."],
    "drop_in_create_agent": ["It is 391."],
    "streaming_steps": ["Plan:", "model", "tools"],
    "custom_verifier": ["2 + 2 = 4.\n\nSo it is 4.", "[1 of 2 steps from the draft]"],
    "custom_tool": ["May this call be made? order(", "It is ordered."],
    "deep_agent": ["/result.txt: 391", "It is 391, as the file says."],
    "concurrent_users": ["It is 36.\n" * 4],
    "tracing": ["run.html"],
    "changing_questions": ["sums: ", "tales: ", "sums again: ", " ms a token; "],
    "ask_our_docs": ["librarian: It is lossless.", "statistician: They are 23.", "23 were right."],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_example_prints_its_results(
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
    output = capsys.readouterr().out
    for text in EXPECTED[name]:
        assert text in output


def test_every_example_has_a_test() -> None:
    # These need servers (tests/integration/test_remote.py) and a data set (test_measure_bfcl.py).
    tested_elsewhere = {"remote_engines", "measure_bfcl"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == EXPECTED.keys() | tested_elsewhere
