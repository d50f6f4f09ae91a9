"""One call of a tool, with what went wrong as text that a model can do something with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from langchain_core.messages import ToolCall, ToolMessage
from langchain_core.tools import BaseTool


class ToolOutcome(NamedTuple):
    """What became of a call.

    Attributes:
        output: What the tool returned, or what went wrong.
        failed: Whether something did.
    """

    output: str
    failed: bool


def use_tool(tools: Mapping[str, BaseTool], name: str, arguments: Mapping[str, Any], call_id: str) -> ToolOutcome:
    """Call a tool by its name.

    What the tool raises that is no error of its own kind (a lost connection) is raised: the node may be tried again.

    Args:
        tools: Tools by name.
        name: The one that is meant.
        arguments: Its arguments.
        call_id: Identity of the call, for traces.
    """
    if name not in tools:
        return _no_tool(tools, name)
    try:
        return _outcome(tools[name].invoke(_request(name, arguments, call_id)))
    except ValueError as error:
        return _wrong_arguments(error)


async def ause_tool(
    tools: Mapping[str, BaseTool], name: str, arguments: Mapping[str, Any], call_id: str
) -> ToolOutcome:
    """`use_tool`, awaited: a tool that is a coroutine can be cancelled, another runs in a thread."""
    if name not in tools:
        return _no_tool(tools, name)
    try:
        return _outcome(await tools[name].ainvoke(_request(name, arguments, call_id)))
    except ValueError as error:
        return _wrong_arguments(error)


def _request(name: str, arguments: Mapping[str, Any], call_id: str) -> ToolCall:
    return ToolCall(name=name, args=dict(arguments), id=call_id, type="tool_call")


def _outcome(message: ToolMessage) -> ToolOutcome:
    return ToolOutcome(message.text, message.status == "error")


def _no_tool(tools: Mapping[str, BaseTool], name: str) -> ToolOutcome:
    return ToolOutcome(f"there is no tool {name}; there are {', '.join(tools)}", failed=True)


def _wrong_arguments(error: ValueError) -> ToolOutcome:
    """Of arguments that do not fit the tool's schema."""
    return ToolOutcome(f"wrong arguments: {error}", failed=True)
