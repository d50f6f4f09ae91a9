"""`action_markers` of a call open an action region, in which only the target writes."""

from __future__ import annotations

import pytest

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.testing import scripted_chat

TARGET = 'I look at the table.\n\nPlan:\n\n1. sql("select 1")\n\n2. sql("select 2")'
WRONG_DRAFT = 'I see the table.\n\nPlan:\n\n1. sql("drop table")\n\n2. sql("drop table")'
ACCEPTS_EVERY_STEP = VerifierPolicy(verifier="random", probability=1.0, depth=4)


def test_only_the_target_writes_after_an_action_marker() -> None:
    llm = scripted_chat(TARGET, lambda prompt: WRONG_DRAFT, policy=ACCEPTS_EVERY_STEP)
    assert "drop" in llm.invoke("?").text, "the policy accepts every draft step"
    reply = llm.invoke("?", action_markers=["Plan:"])
    thoughts, _, plan = reply.text.partition("Plan:")
    assert thoughts == "I see the table.\n\n", "the draft writes the thoughts"
    assert plan == TARGET.partition("Plan:")[2]


@pytest.mark.parametrize("markers", [[""], "Plan:", ["\ud800"], [1]])
def test_action_markers_must_be_a_list_of_non_empty_text(markers: object) -> None:
    with pytest.raises(ConfigurationError, match="action_markers"):
        scripted_chat("Hm.").invoke("?", action_markers=markers)
