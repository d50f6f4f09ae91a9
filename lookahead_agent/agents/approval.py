"""Calls that a person must allow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.types import interrupt


def check_ask_before(
    ask_before: Collection[str], tools: Mapping[str, BaseTool], checkpointer: BaseCheckpointSaver[str] | None
) -> None:
    """Check that a graph can ask before calls of some tools.

    Args:
        ask_before: Their names.
        tools: The tools that there are, by name.
        checkpointer: Where a run that waits is kept.

    Raises:
        ValueError: It names none of the tools, or there is no checkpointer.
    """
    if unknown := sorted(set(ask_before) - tools.keys()):
        raise ValueError(f"ask_before names tools that there are not: {', '.join(unknown)}")
    if ask_before and checkpointer is None:
        raise ValueError("ask_before needs a checkpointer: a run that waits is kept there")


def refusal_of(tool: str, arguments: Mapping[str, Any]) -> str | None:
    """Stop the graph and ask whether a call is to be made; it goes on with `Command(resume=…)`.

    Args:
        tool: The tool's name.
        arguments: Of the call.

    Returns:
        None if it is to be made (`resume=True`), else why not.
    """
    decision = interrupt({"tool": tool, "arguments": arguments, "question": "May this call be made?"})
    if decision is True:
        return None
    return decision if isinstance(decision, str) and decision else "the user does not want this call"
