"""`lookahead-agent agent` on a scripted model: policies, tools, threads, approvals and comparisons."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lookahead_agent.agents.templates import template
from lookahead_agent.cli.agent import EXAMPLE
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.testing import scripted_chat, scripted_replies
from tests.unit.test_cli import run
from tests.unit.test_examples import reply_to

BASE = template("graphs", "plan_execute").POLICIES


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), BASE),
        (("--policy", "fast"), dict.fromkeys(BASE, "fast")),
        (("--node-policy", "planner=fast"), BASE | {"planner": "fast"}),
        (("--depth", "2"), {"planner": BASE["planner"] + ":depth=2", "executor": "off", "finisher": "strict:depth=2"}),
        (
            ("--node-policy", "executor=strict", "--node-policy", "finisher=off", "--depth", "3"),
            {"planner": BASE["planner"] + ":depth=3", "executor": "strict:depth=3", "finisher": "off"},
        ),
    ],
)
def test_nodes_without_a_policy_option_keep_the_templates_policy(
    arguments: tuple[str, ...], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passed: list[dict[str, VerifierPolicy]] = []

    def chat(**fields: Any) -> Any:
        passed.append(fields["policies"])
        return scripted_chat(reply_to, **fields)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run("agent", "How many?", *arguments, chat_class=chat) == 0
    (policies,) = passed
    assert {node: _settings(policy) for node, policy in policies.items()} == {
        node: _settings(as_policy(name)) for node, name in expected.items()
    }


def _settings(policy: VerifierPolicy) -> dict[str, Any]:
    return policy.model_dump(exclude={"name"})


QUERY = json.dumps({"name": "sql", "arguments": {"statement": "SELECT SUM(amount) FROM sales WHERE city = 'Porto'"}})
SUM = json.dumps({"name": "calculator", "arguments": {"expression": "701.3 * 1.19"}})
READY = json.dumps({"name": "ready_to_answer", "arguments": {}})


def shop_agent(**fields: Any) -> Any:
    replies = scripted_replies(
        You_think="The sales are needed.",
        You_carry_out=[QUERY, SUM, READY],
        You_answer="It is 834.55 euros.",
    )
    return scripted_chat(replies, policies=fields["policies"])


@pytest.fixture
def workdir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_agent_without_a_question_runs_the_example(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("agent", "--template", "react", chat_class=shop_agent) == 0
    lines = [line.rstrip(" ─") for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["question", EXAMPLE]
    assert lines[2:10] == [
        "thinker", "The sales are needed.", "tools",
        "[1] sql(statement=\"SELECT SUM(amount) FROM sales WHERE city = 'Porto'\")", "701.3",
        '[2] calculator(expression="701.3 * 1.19")', "834.547", "finisher",
    ]  # fmt: skip
    assert lines[10:12] == ["It is 834.55 euros.", ""], "the answer is printed once"


def test_json_output_is_one_object_with_the_conversation(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("agent", "How much?", "--template", "react", "--json", chat_class=shop_agent) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["answer"] == "It is 834.55 euros."
    assert [message["role"] for message in output["messages"]] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert [node["node"] for node in output["nodes"]] == ["thinker", "actor", "finisher"]


def test_thread_resumes_and_answers_another_question(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--template", "react", "--thread", "t", "--ask-before", "sql", "--json")
    empty_input = patched_input()
    with empty_input:
        assert run("agent", "How much?", *arguments, chat_class=shop_agent) == 1
        assert "resume with --thread t" in capsys.readouterr().err.replace("\n", " ")
        assert run("agent", "What else?", *arguments, chat_class=shop_agent) == 2
        assert "in the middle of another question: 'How much?'" in capsys.readouterr().err.replace("\n", " ")
    with patched_input("yes"):
        assert run("agent", *arguments, chat_class=shop_agent) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == "It is 834.55 euros."
    assert run("agent", *arguments, chat_class=shop_agent) == 2
    assert "has its answer" in capsys.readouterr().err.replace("\n", " ")
    with patched_input("yes"):
        assert run("agent", "And again?", *arguments, chat_class=shop_agent) == 0
    roles = [message["role"] for message in json.loads(capsys.readouterr().out)["messages"]]
    assert roles.count("user") == 2
    assert roles[-1] == "assistant"


def patched_input(*lines: str) -> Any:
    """Replace standard input with these lines."""
    return patch("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_compare_prints_time_won_or_cost_by_forced_depth(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--template", "react", "--depth", "4", "--compare", "--trace", "run.html")
    assert run("agent", *arguments, chat_class=shop_agent) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert out.index("With the default depth:") < out.index("With --depth 4:")
    pattern = r"Draft steps forced by --depth 4: [\d.]+ s, by default [\d.]+ s\. They (won|cost) [\d.]+ s on"
    assert re.search(pattern, out)
    assert "the answers differ" not in out
    assert (workdir / "run.html").read_text().startswith("<!")
