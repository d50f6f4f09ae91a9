"""Figures of an agent's run, node by node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult


def replies(response: LLMResult) -> Iterator[tuple[AIMessage, dict[str, Any]]]:
    """The replies of a `ChatLookahead` among those that a callback is told of, each with what its metadata reports."""
    for generations in response.generations:
        for generation in generations:
            message = generation.message if isinstance(generation, ChatGeneration) else None
            if isinstance(message, AIMessage) and "lookahead" in message.response_metadata:
                yield message, message.response_metadata["lookahead"]


class NodeFigures(BaseCallbackHandler):
    """Collects what `ChatLookahead` reports in a graph, summed by node.

    Give it to the graph: `graph.invoke(..., {"callbacks": [figures]})`.
    """

    def __init__(self) -> None:
        self._nodes: dict[str | None, dict[str, Any]] = {}

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Add one reply."""
        for message, reported in replies(response):
            self._add(message, reported)

    def _add(self, message: AIMessage, reported: Mapping[str, Any]) -> None:
        node = self._nodes.setdefault(
            reported["node"],
            {
                "node": reported["node"],
                "policy": reported["policy"],
                "replies": 0,
                "steps": 0,
                "accepted": 0,
                "acceptance_rate": 0.0,
                "verifier_calls": 0,
                "output_tokens": 0,
                "tokens": {role: dict.fromkeys(fates, 0) for role, fates in reported["tokens"].items()},
                "seconds": dict.fromkeys(reported["seconds"], 0.0),
            },
        )
        node["replies"] += 1
        for key in ("steps", "accepted", "verifier_calls"):
            node[key] += reported[key]
        node["acceptance_rate"] = node["accepted"] / node["steps"] if node["steps"] else 0.0
        node["output_tokens"] += message.usage_metadata["output_tokens"] if message.usage_metadata else 0
        for role, fates in reported["tokens"].items():
            for fate, count in fates.items():
                node["tokens"][role][fate] += count
        for part, seconds in reported["seconds"].items():
            node["seconds"][part] += seconds

    def nodes(self) -> list[dict[str, Any]]:
        """One entry per node, in the order in which the nodes first replied."""
        return list(self._nodes.values())
