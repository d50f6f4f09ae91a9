"""Metrics of a graph's run: what it used of its budget, and the metadata of each node's replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult
from langgraph.types import TimeoutPolicy
from typing_extensions import TypedDict

from lookahead_agent.decoding import acceptance_rate
from lookahead_agent.trace.recorder import replies
from lookahead_agent.trace.timeline import concurrency

Reply = TypeVar("Reply")


class Usage(TypedDict, total=False):
    """Model calls and tool calls (steps), tokens that models read and wrote, and seconds in nodes.

    Time in which a run waits for a person, or lies in a checkpoint, does not count.
    """

    steps: int
    tokens: int
    seconds: float


def add_usage(first: Usage | None, second: Usage | None) -> Usage:
    """The sum of two; a reducer for a graph's state."""
    a, b = first or {}, second or {}
    return Usage(
        steps=a.get("steps", 0) + b.get("steps", 0),
        tokens=a.get("tokens", 0) + b.get("tokens", 0),
        seconds=a.get("seconds", 0.0) + b.get("seconds", 0.0),
    )


@dataclass(frozen=True)
class Budget:
    """What a run may spend; a graph that reaches a limit answers with what it has.

    Attributes:
        steps: Model calls and tool calls.
        tokens: Tokens that models read and wrote.
        seconds: Seconds in nodes.
        node_timeout: Seconds for one try of a node, or LangGraph's `TimeoutPolicy`. LangGraph then cancels the node's
            requests and raises `NodeTimeoutError`, after the retries that a node has. Only graphs that are awaited
            (`ainvoke`, `astream`) can be cancelled: the others refuse it. None: no limit.

    Raises:
        ValueError: A limit that is not above 0.
    """

    steps: int = 40
    tokens: int = 50_000
    seconds: float = 900.0
    node_timeout: float | TimeoutPolicy | None = None

    def __post_init__(self) -> None:
        if min(self.steps, self.tokens, self.seconds) <= 0:
            raise ValueError("limits are above 0")
        TimeoutPolicy.coerce(self.node_timeout)

    def steps_left(self, usage: Usage | None) -> int:
        """How many model calls and tool calls may still be made."""
        return self.steps - add_usage(usage, None)["steps"]

    def reached(self, usage: Usage | None) -> str | None:
        """Which limit is reached, in words; None if none is."""
        now = add_usage(usage, None)
        if now["steps"] >= self.steps:
            return f"the limit of {self.steps} steps is reached"
        if now["tokens"] >= self.tokens:
            return f"the limit of {self.tokens} tokens is reached"
        if now["seconds"] >= self.seconds:
            return f"the limit of {self.seconds:g} seconds is reached"
        return None


class UsageMeter:
    """Counts what a node spends, from the moment it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._steps = 0
        self._tokens = 0

    def count(self, reply: Reply) -> Reply:
        """Count a model's reply: a message, or a structured output that has its message as "raw". Returns it."""
        message = reply["raw"] if isinstance(reply, dict) else reply
        usage = getattr(message, "usage_metadata", None)
        self._steps += 1
        self._tokens += usage["total_tokens"] if usage else 0
        return reply

    def usage(self, steps: int = 0) -> Usage:
        """What was spent until now.

        Args:
            steps: Tool calls, which count as steps as well.
        """
        return Usage(steps=self._steps + steps, tokens=self._tokens, seconds=time.monotonic() - self._began)


class NodeMetrics(BaseCallbackHandler):
    """Collects the metadata of `ChatLookahead`'s replies in a graph, summed by node.

    Give it to the graph: `graph.invoke(..., {"callbacks": [metrics]})`.

    Args:
        now: Clock in seconds.
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
        node["tokens"] = {
            role: _added(node.get("tokens", {}).get(role, {}), counts) for role, counts in reported["tokens"].items()
        }
        node["prompt_tokens"] = {
            role: _added(node.get("prompt_tokens", {}).get(role, {}), counts)
            for role, counts in reported["prompt_tokens"].items()
        }
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
