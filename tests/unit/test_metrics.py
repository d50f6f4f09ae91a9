"""Metrics of a run, node by node."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from langchain_core.outputs import LLMResult

from lookahead_agent.agents.metrics import NodeMetrics
from tests.unit.chat import scripted_chat


def test_a_reply_has_its_time_to_the_first_word() -> None:
    metrics = NodeMetrics()
    scripted_chat("One.\n\nTwo.").invoke("?", {"callbacks": [metrics]})
    (node,) = metrics.nodes()
    assert 0 < node["seconds"]["first"] <= node["seconds"]["total"]
    some, several = metrics.concurrency()
    assert some > 0
    assert several == 0


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
