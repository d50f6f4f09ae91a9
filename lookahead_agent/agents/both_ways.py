"""Nodes that are written once, as coroutines, and run in graphs that are invoked with `await` and without.

Awaited, a node that is cancelled, by its caller or by LangGraph's time-out, ends what it asked for at once. Without
`await` there is no event loop to wait in: what a node awaits is then done in place, by the models' and tools' own
synchronous methods, so that a client that belongs to one event loop is never used from two.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import ToolOutcome, ause_tool, use_tool

State = TypeVar("State")
Update = TypeVar("Update")
Question = TypeVar("Question")
Reply = TypeVar("Reply")
Given = ParamSpec("Given")

_awaited: ContextVar[bool] = ContextVar("awaited", default=False)
"""Whether the node that is running was awaited."""


class BothWays(RunnableLambda[State, Update]):
    """A node of a graph, from a coroutine function that awaits nothing but this module's functions.

    Args:
        node: Given the state, what the node changes of it.

    Raises:
        RuntimeError: Without `await`, the node waited for something else.
    """

    # A `RunnableLambda`, because LangGraph looks into those for the graphs that they run.

    def __init__(self, node: Callable[[State], Coroutine[Any, Any, Update]]) -> None:
        super().__init__(node)
        self._node = node

    def invoke(self, input: State, config: RunnableConfig | None = None, **_: Any) -> Update:
        """Run the node in this thread."""
        before = _awaited.set(False)
        running = self._node(input)
        try:
            running.send(None)
        except StopIteration as done:
            return cast("Update", done.value)
        finally:
            _awaited.reset(before)
        running.close()
        raise RuntimeError(f"{self.get_name()} waits for something that only a graph that is awaited can do")

    async def ainvoke(self, input: State, config: RunnableConfig | None = None, **_: Any) -> Update:
        """Run the node in this event loop."""
        before = _awaited.set(True)
        try:
            return await self._node(input)
        finally:
            _awaited.reset(before)


async def ask(asked: Runnable[Question, Reply], question: Question, **options: Any) -> Reply:
    """What a model replies, or what was made of one (`with_structured_output`), or a graph within a node."""
    if _awaited.get():
        return await asked.ainvoke(question, **options)
    return asked.invoke(question, **options)


async def stream(model: BaseChatModel, messages: Sequence[BaseMessage]) -> AsyncGenerator[AIMessageChunk]:
    """What a model replies, as it comes."""
    if _awaited.get():
        async for chunk in model.astream(list(messages)):
            yield chunk
    else:
        for chunk in model.stream(list(messages)):
            yield chunk


async def call_tool(
    tools: Mapping[str, BaseTool], name: str, arguments: Mapping[str, Any], call_id: str | None
) -> ToolOutcome:
    """What became of a call: see `tool_use.use_tool`."""
    if _awaited.get():
        return await ause_tool(tools, name, arguments, call_id)
    return use_tool(tools, name, arguments, call_id)


async def run_blocking(work: Callable[Given, Update], *args: Given.args, **kwargs: Given.kwargs) -> Update:
    """Does what blocks: in a thread, where an event loop must not be held up."""
    if _awaited.get():
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)
