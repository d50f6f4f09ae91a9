"""Metrics of a graph's run: reply metadata, summed by node."""

import threading
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from lookahead_agent.decoding import acceptance_rate
from lookahead_agent.trace.recorder import replies


class NodeMetrics(BaseCallbackHandler):
    """Sums the metadata of `ChatLookahead`'s replies by node: `graph.invoke(..., {"callbacks": [NodeMetrics()]})`.

    Replies from LangChain's cache count nothing, because no engine wrote them.
    """

    def __init__(self) -> None:
        self._nodes: dict[str | None, dict[str, Any]] = {}
        self._lock = threading.Lock()  # concurrent nodes end in different threads

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Add one reply."""
        with self._lock:
            for message, reported in replies(response):
                name = reported["node"]
                node = self._nodes.setdefault(name, {"node": name, "policy": reported["policy"], "replies": 0})
                summed = ("steps", "accepted", "verifier_calls", "target_forward_passes")
                node |= _sum(node, {"replies": 1} | {key: reported[key] for key in summed})
                node["acceptance_rate"] = acceptance_rate(node["accepted"], node["steps"])
                tokens = message.usage_metadata["output_tokens"] if message.usage_metadata else 0
                node["output_tokens"] = node.get("output_tokens", 0) + tokens
                for key in ("tokens", "prompt_tokens"):
                    before = node.get(key, {})
                    node[key] = {role: _sum(before.get(role, {}), counts) for role, counts in reported[key].items()}
                node["seconds"] = _sum(node.get("seconds", {}), reported["seconds"])

    def nodes(self) -> list[dict[str, Any]]:
        """One entry per node, in the order in which the nodes first replied."""
        return list(self._nodes.values())


def _sum(total: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Sum two mappings by key; None if either value is unknown."""
    return {
        name: None if value is None or total.get(name, 0) is None else total.get(name, 0) + value
        for name, value in more.items()
    }
