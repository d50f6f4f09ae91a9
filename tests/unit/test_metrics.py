"""Metrics of each node of a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumps, loads
from langchain_core.runnables import RunnableConfig

from lookahead_agent.agents.metrics import NodeMetrics
from lookahead_agent.bench.samples import CallRecorder
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.trace.node_times import node_times, spans_of
from lookahead_agent.trace.recorder import TraceRecorder
from lookahead_agent.trace.timeline import timeline
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


class StoredCache(InMemoryCache):
    """Keeps replies as text, as LangChain's caches in databases do."""

    def lookup(self, prompt: str, llm_string: str) -> Any:
        rows = super().lookup(prompt, llm_string)
        return None if rows is None else [loads(str(row), allowed_objects="core") for row in rows]

    def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
        super().update(prompt, llm_string, [dumps(reply) for reply in return_val])  # type: ignore[misc]


@pytest.mark.parametrize("cache", [InMemoryCache(), StoredCache()])
def test_replies_from_the_cache_count_nothing(cache: InMemoryCache) -> None:
    llm = scripted_chat("One.\n\nIt is 4.", policy="exact:depth=2", cache=cache)
    metrics, recorder, bench = NodeMetrics(), TraceRecorder(), CallRecorder(llm.backend.tokenizer().decode)
    config: RunnableConfig = {"callbacks": [metrics, recorder, bench]}
    llm.invoke("q", config)
    node, spans = dict(metrics.nodes()[0]), spans_of(recorder.rows)
    assert node["replies"] == 1
    for answer in (llm.invoke("q", config), asyncio.run(llm.ainvoke("q", config)), llm.batch(["q"], config)[0]):
        assert answer.text == "One.\n\nIt is 4."
    assert metrics.nodes() == [node]
    assert spans_of(recorder.rows) == spans
    assert node_times(spans)[0].replies == len(timeline(recorder.rows)) == 1
    assert len(bench.calls) == 1
    assert recorder._prompts == {}, "the prompts of cached replies are not kept"
    llm.invoke("another question", config)
    assert metrics.nodes()[0]["replies"] == 2
