"""Texts of a call's own that open an action region: behind them only the target writes."""

from __future__ import annotations

import pytest

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.testing import scripted_chat

TARGET = 'I look at the table.\n\nPlan:\n\n1. sql("select 1")\n\n2. sql("select 2")'
LIES = 'I see the table.\n\nPlan:\n\n1. sql("drop table")\n\n2. sql("drop table")'
EVERYTHING = VerifierPolicy(verifier="random", probability=1.0, depth=4)


def test_a_draft_that_lies_writes_no_word_behind_a_marker() -> None:
    llm = scripted_chat(TARGET, lambda prompt: LIES, policy=EVERYTHING)
    assert "drop" in llm.invoke("?").text, "the policy accepts every draft step"
    reply = llm.invoke("?", action_markers=["Plan:"])
    thoughts, _, plan = reply.text.partition("Plan:")
    assert thoughts == "I see the table.\n\n", "thoughts are the draft's"
    assert plan == TARGET.partition("Plan:")[2]


@pytest.mark.parametrize("markers", [[""], "Plan:", ["\ud800"], [1]])
def test_markers_are_texts_that_are_not_empty(markers: object) -> None:
    with pytest.raises(ConfigurationError, match="action_markers"):
        scripted_chat("Hm.").invoke("?", action_markers=markers)
