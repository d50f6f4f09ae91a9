"""The budget of a graph's run, and what the run has used of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeVar

from langgraph.types import TimeoutPolicy
from typing_extensions import TypedDict

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
