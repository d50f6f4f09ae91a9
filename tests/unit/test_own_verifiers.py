"""A verifier of the user's own, named as module:Class, in every command that takes a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.errors import LookaheadError
from lookahead_agent.policy import as_policy
from tests.unit.test_cli import run

MODULE = """
from lookahead_agent.verifiers import StepPair, Verdict

class Never:
    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(False, "never")
"""
OWN = "verifiers_of_a_test:Never"


class Stopped(LookaheadError):
    """The command has created its chat model."""


@pytest.mark.parametrize(
    "arguments",
    [
        ("ask", "How?", "--policy", OWN),
        ("agent", "How?", "--policy", OWN),
        ("agent", "How?", "--node-policy", f"planner={OWN}:depth=2"),
        ("serve", "--policy", OWN),
        ("serve", "--node-policy", f"planner={OWN}"),
        ("bench", "--modes", "lr", "--policies", f"{OWN}:depth=2", "--limit", "1"),
        ("bench", "--modes", "lr", "--policies", OWN, "--depths", "2", "--task", "react", "--limit", "1"),
    ],
)
def test_every_command_takes_a_verifier_of_ones_own(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "verifiers_of_a_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    policies: list[Any] = []

    def chat(**fields: Any) -> Any:
        policies.extend([fields.get("policy"), *(fields.get("policies") or {}).values()])
        for policy in filter(None, policies):  # as the chat model does
            as_policy(policy)
        if arguments[0] == "bench" and not any("Never" in str(policy) for policy in policies):
            return None  # the baseline's
        raise Stopped

    assert run(*arguments, chat_class=chat) == 1, capsys.readouterr().err
    assert OWN in {as_policy(policy).verifier for policy in policies if policy is not None}
    assert run(*(each.replace("Never", "Missing") for each in arguments), chat_class=chat) == 2
    assert "Missing" in capsys.readouterr().err
