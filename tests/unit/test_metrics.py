"""Metrics of each node of a run."""

from __future__ import annotations

import pytest

from lookahead_agent.agents.metrics import NodeMetrics
from lookahead_agent.chat.model import ChatLookahead
from tests.unit.chat import scripted_chat, scripted_engines


def test_prompt_and_writing_seconds_of_a_reply_add_up_to_its_total() -> None:
    metrics = NodeMetrics()
    scripted_chat("One.\n\nTwo.").invoke("?", {"callbacks": [metrics]})
    (node,) = metrics.nodes()
    assert 0 < node["seconds"]["prompt"] <= node["seconds"]["total"]
    assert node["seconds"]["prompt"] + node["seconds"]["writing"] == pytest.approx(node["seconds"]["total"])


def test_cached_prompt_tokens_are_reported_per_reply_and_summed_per_node() -> None:
    metrics = NodeMetrics()
    llm = ChatLookahead(engines=scripted_engines("Four.", prefix_cache=True), policy="off")
    first, second = (llm.invoke(text, {"callbacks": [metrics]}) for text in ("2 + 2?", "2 + 2? Once more."))
    cached = [message.usage_metadata["input_token_details"]["cache_read"] for message in (first, second)]  # type: ignore[index]
    assert cached[0] == 0
    assert cached[1] > 5
    prompt_tokens = [message.usage_metadata["input_tokens"] for message in (first, second)]  # type: ignore[index]
    (node,) = metrics.nodes()
    assert node["prompt_tokens"]["target"] == {"total": sum(prompt_tokens), "cached": sum(cached)}
    assert node["prompt_tokens"]["draft"] == {"total": 0, "cached": 0}, "the draft got no request"


def test_cached_prompt_tokens_are_unknown_if_the_engine_does_not_report_them() -> None:
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
