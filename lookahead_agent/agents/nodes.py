"""Nodes of graphs that ask a model or call tools, and work in `invoke` and in `ainvoke`.

Each is a `RunnableLambda` with a function and a coroutine. A node that is awaited can be cancelled, by its caller or by
LangGraph's time-out, and then ends the request that it made. One that is not awaited uses the models' and tools' own
synchronous methods, so that a client that belongs to one event loop is never used from two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool

from lookahead_agent.agents.metrics import Usage, UsageMeter, add_usage
from lookahead_agent.agents.tool_use import ToolOutcome, ause_tool, use_tool

State = TypeVar("State")


def model_node(
    model: Runnable[Any, Any],
    prompt: Callable[[State], Sequence[BaseMessage] | AIMessage],
    update: Callable[[State, Any], Mapping[str, Any]],
) -> RunnableLambda[State, dict[str, Any]]:
    """A node that asks a model.

    Args:
        model: A chat model, or what was made of one by `bind_tools` or `with_structured_output(…, include_raw=True)`.
        prompt: The messages for the model, from the state; or a reply that is known without asking.
        update: What the node changes, from the state and the reply. What the node spent is added as `usage`.
    """

    def node(state: State) -> dict[str, Any]:
        meter, asked = UsageMeter(), prompt(state)
        reply = asked if isinstance(asked, AIMessage) else meter.count(model.invoke(asked))
        return _with_usage(update(state, reply), meter.usage())

    async def anode(state: State) -> dict[str, Any]:
        meter, asked = UsageMeter(), prompt(state)
        reply = asked if isinstance(asked, AIMessage) else meter.count(await model.ainvoke(asked))
        return _with_usage(update(state, reply), meter.usage())

    return RunnableLambda(node, anode)


def tool_node(
    tools: Mapping[str, BaseTool],
    calls: Callable[[State], Sequence[ToolCall | ToolOutcome]],
    update: Callable[[State, list[ToolOutcome]], Mapping[str, Any]],
) -> RunnableLambda[State, dict[str, Any]]:
    """A node that calls tools, one after another.

    Args:
        tools: Tools by name.
        calls: The calls, from the state; or outcomes that are known without calling. Each counts as a step.
        update: What the node changes, from the state and the outcomes. What the node spent is added as `usage`.
    """

    def node(state: State) -> dict[str, Any]:
        meter, asked = UsageMeter(), calls(state)
        outcomes = [call if isinstance(call, ToolOutcome) else use_tool(tools, call) for call in asked]
        return _with_usage(update(state, outcomes), meter.usage(steps=len(outcomes)))

    async def anode(state: State) -> dict[str, Any]:
        meter, asked = UsageMeter(), calls(state)
        outcomes = [call if isinstance(call, ToolOutcome) else await ause_tool(tools, call) for call in asked]
        return _with_usage(update(state, outcomes), meter.usage(steps=len(outcomes)))

    return RunnableLambda(node, anode)


def plain_node(update: Callable[[State], Mapping[str, Any]]) -> RunnableLambda[State, Mapping[str, Any]]:
    """A node that waits for nothing: LangGraph has time-outs for coroutines only.

    Args:
        update: What the node changes, from the state.
    """

    async def anode(state: State) -> Mapping[str, Any]:
        return update(state)

    return RunnableLambda(update, anode)


def _with_usage(update: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
    return {**update, "usage": add_usage(update.get("usage"), usage)}
