"""Metrics of a graph's run: the metadata of the replies, summed by node."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult

from lookahead_agent.decoding import acceptance_rate
from lookahead_agent.trace.recorder import replies
from lookahead_agent.trace.timeline import concurrency


class NodeMetrics(BaseCallbackHandler):
    """Sums the metadata of `ChatLookahead`'s replies by node: `graph.invoke(..., {"callbacks": [NodeMetrics()]})`.

    `now` is a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._nodes: dict[str | None, dict[str, Any]] = {}
        self._started: dict[UUID, float] = {}
        self._spans: list[tuple[float, float]] = []
        self._lock = threading.Lock()  # nodes that run at once end in threads of their own

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Note when a reply begins."""
        with self._lock:
            self._started[run_id] = self._now()

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Add one reply."""
        ended = self._now()
        with self._lock:
            self._spans.append((self._started.pop(run_id, ended), ended))
            for message, reported in replies(response):
                self._add(message, reported)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a reply that came to nothing."""
        with self._lock:
            self._started.pop(run_id, None)

    def _add(self, message: AIMessage, reported: Mapping[str, Any]) -> None:
        node = self._nodes.setdefault(
            reported["node"], {"node": reported["node"], "policy": reported["policy"], "replies": 0}
        )
        node["replies"] += 1
        for key in ("steps", "accepted", "verifier_calls", "target_forward_passes"):
            node[key] = node.get(key, 0) + reported[key]
        node["acceptance_rate"] = acceptance_rate(node["accepted"], node["steps"])
        tokens = message.usage_metadata["output_tokens"] if message.usage_metadata else 0
        node["output_tokens"] = node.get("output_tokens", 0) + tokens
        for key in ("tokens", "prompt_tokens"):
            before = node.get(key, {})
            node[key] = {role: _added(before.get(role, {}), counts) for role, counts in reported[key].items()}
        node["seconds"] = _added(node.get("seconds", {}), reported["seconds"])

    def concurrency(self) -> tuple[float, float]:
        """Seconds in which a reply was written, and those of them in which several were."""
        with self._lock:
            return concurrency(self._spans)

    def nodes(self) -> list[dict[str, Any]]:
        """One entry per node, in the order in which the nodes first replied."""
        return list(self._nodes.values())


def _added(total: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The sum, name by name; None where one is not known."""
    return {
        name: None if value is None or total.get(name, 0) is None else total.get(name, 0) + value
        for name, value in more.items()
    }
