"""Metrics of a run, node by node."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from langchain_core.outputs import LLMResult

from lookahead_agent.agents.metrics import NodeMetrics
from lookahead_agent.chat.model import ChatLookahead
from tests.unit.chat import scripted_chat, scripted_engines


def test_a_reply_has_its_time_to_the_first_word() -> None:
    metrics = NodeMetrics()
    scripted_chat("One.\n\nTwo.").invoke("?", {"callbacks": [metrics]})
    (node,) = metrics.nodes()
    assert 0 < node["seconds"]["prompt"] <= node["seconds"]["total"]
    assert node["seconds"]["prompt"] + node["seconds"]["writing"] == pytest.approx(node["seconds"]["total"])
    some, several = metrics.concurrency()
    assert some > 0
    assert several == 0


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


@pytest.mark.parametrize(
    ("spans", "some", "several"),
    [
        ([], 0, 0),
        ([(0, 2), (5, 6)], 3, 0),
        ([(0, 4), (1, 3)], 4, 2),
        ([(0, 4), (1, 3), (2, 6)], 6, 3),
        ([(0, 2), (2, 4)], 4, 0),
    ],
)
def test_how_long_several_replies_were_written_at_once(
    spans: list[tuple[float, float]], some: float, several: float
) -> None:
    clock = [0.0]
    metrics = NodeMetrics(now=lambda: clock[0])
    events = [(start, "start", uuid.uuid4(), end) for start, end in spans]
    moments = sorted(
        [(start, "b", run) for start, _, run, _ in events] + [(end, "a", run) for _, _, run, end in events]
    )
    for clock[0], kind, run in moments:
        if kind == "b":
            metrics.on_chat_model_start({}, [], run_id=run)
        else:
            metrics.on_llm_end(LLMResult(generations=[]), run_id=run)
    lost: Any = uuid.uuid4()
    metrics.on_chat_model_start({}, [], run_id=lost)
    metrics.on_llm_error(RuntimeError(), run_id=lost)
    assert metrics.concurrency() == (some, several)
