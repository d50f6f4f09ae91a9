"""Metrics of a run, node by node."""

from __future__ import annotations

import pytest

from lookahead_agent.agents.metrics import NodeMetrics
from lookahead_agent.chat.model import ChatLookahead
from tests.unit.chat import scripted_chat, scripted_engines


def test_a_reply_has_its_time_to_the_first_word() -> None:
    metrics = NodeMetrics()
    scripted_chat("One.\n\nTwo.").invoke("?", {"callbacks": [metrics]})
    (node,) = metrics.nodes()
    assert 0 < node["seconds"]["prompt"] <= node["seconds"]["total"]
    assert node["seconds"]["prompt"] + node["seconds"]["writing"] == pytest.approx(node["seconds"]["total"])


def test_what_an_engine_had_of_the_prompts_is_told_reply_by_reply_and_summed() -> None:
    metrics = NodeMetrics()
    llm = ChatLookahead(engines=scripted_engines("Four.", prefix_cache=True), policy="off")
    first, second = (llm.invoke(text, {"callbacks": [metrics]}) for text in ("2 + 2?", "2 + 2? Once more."))
    cached = [message.usage_metadata["input_token_details"]["cache_read"] for message in (first, second)]  # type: ignore[index]
    assert cached[0] == 0
    assert cached[1] > 5
    asked = [message.usage_metadata["input_tokens"] for message in (first, second)]  # type: ignore[index]
    (node,) = metrics.nodes()
    assert node["prompt_tokens"]["target"] == {"total": sum(asked), "cached": sum(cached)}
    assert node["prompt_tokens"]["draft"] == {"total": 0, "cached": 0}, "it was asked nothing"


def test_an_engine_that_does_not_tell_what_it_had_of_a_prompt() -> None:
    metrics = NodeMetrics()
    llm = scripted_chat("One.\n\nTwo.")
    for _ in range(2):
        message = llm.invoke("?", {"callbacks": [metrics]})
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_token_details"] == {}
    (node,) = metrics.nodes()
    for role in ("target", "draft"):
        assert node["prompt_tokens"][role]["total"] > 0
        assert node["prompt_tokens"][role]["cached"] is None
