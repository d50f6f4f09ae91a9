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

OWN = template("graphs", "plan_execute").POLICIES


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), OWN),
        (("--policy", "fast"), dict.fromkeys(OWN, "fast")),
        (("--node-policy", "planner=fast"), OWN | {"planner": "fast"}),
        (("--depth", "2"), {"planner": OWN["planner"] + ":depth=2", "executor": "off", "finisher": "strict:depth=2"}),
        (
            ("--node-policy", "executor=strict", "--node-policy", "finisher=off", "--depth", "3"),
            {"planner": OWN["planner"] + ":depth=3", "executor": "strict:depth=3", "finisher": "off"},
        ),
    ],
)
def test_what_is_not_said_is_as_in_the_template(
    arguments: tuple[str, ...], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[dict[str, VerifierPolicy]] = []

    def chat(**fields: Any) -> Any:
        given.append(fields["policies"])
        return scripted_chat(reply_to, **fields)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run("agent", "How many?", *arguments, chat_class=chat) == 0
    (found,) = given
    assert {node: _rules(policy) for node, policy in found.items()} == {
        node: _rules(as_policy(name)) for node, name in expected.items()
    }


def _rules(policy: VerifierPolicy) -> dict[str, Any]:
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
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_needs_no_arguments(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("agent", "--template", "react", chat_class=shop_agent) == 0
    lines = [line.rstrip(" ─") for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["question", EXAMPLE]
    assert lines[2:10] == [
        "thinker", "The sales are needed.", "tools",
        "[1] sql(statement=\"SELECT SUM(amount) FROM sales WHERE city = 'Porto'\")", "701.3",
        '[2] calculator(expression="701.3 * 1.19")', "834.547", "finisher",
    ]  # fmt: skip
    assert "Answer: It is 834.55 euros." in lines


def test_one_object_has_the_conversation(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("agent", "How much?", "--template", "react", "--json", chat_class=shop_agent) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["answer"] == "It is 834.55 euros."
    assert [message["role"] for message in said["messages"]] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert [node["node"] for node in said["nodes"]] == ["thinker", "actor", "finisher"]


def test_a_thread_is_resumed_and_asked_again(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--template", "react", "--thread", "t", "--ask-before", "sql", "--json")
    nobody = patched_input()
    with nobody:
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
    """Standard input with these lines."""
    return patch("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_what_forced_steps_won_or_cost_is_said(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--template", "react", "--depth", "4", "--compare", "--trace", "run.html")
    assert run("agent", *arguments, chat_class=shop_agent) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert out.index("With the default depth:") < out.index("With --depth 4:")
    said = r"Draft steps forced by --depth 4: [\d.]+ s, by default [\d.]+ s\. They (won|cost) [\d.]+ s on"
    assert re.search(said, out)
    assert "the answers differ" not in out
    assert (state / "run.html").read_text().startswith("<!")
