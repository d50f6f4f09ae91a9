"""Which policy each node of `lookahead-agent agent` gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.agents.templates import template
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.testing import scripted_chat
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
