"""Whatever ends a call, none of its requests stays in the engines: left, cancelled, timed out, or broken by others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler
from langgraph.graph import START, MessagesState, StateGraph

from lookahead_agent import ChatLookahead
from lookahead_agent.testing import scripted_chat
from tests.waiting import becomes

SCHEMA = {"title": "Found", "type": "object", "properties": {"word": {"type": "string"}}}


@pytest.fixture(params=["off", "exact:depth=4"])
def llm(request: pytest.FixtureRequest) -> ChatLookahead:
    """A model whose replies take minutes."""
    return scripted_chat("One word after another.\n\n" * 2000, policy=request.param, max_tokens=1_000_000)


def running(llm: ChatLookahead) -> int:
    """Requests in both engines."""
    engines = llm.engines
    assert engines is not None
    assert engines.draft is not None
    return engines.target.in_flight + engines.draft.in_flight


class BreakingError(Exception):
    """What breaks a call."""


class Breaks(AsyncCallbackHandler):
    """A callback that fails at the first piece."""

    raise_error = True

    async def on_llm_new_token(self, *_: Any, **__: Any) -> None:
        raise BreakingError


async def left(llm: ChatLookahead) -> None:
    async for _ in llm.astream("q"):
        break


async def left_in_a_thread(llm: ChatLookahead) -> None:
    def leave() -> None:
        for _ in llm.stream("q"):
            break

    await asyncio.to_thread(leave)


async def left_by_events(llm: ChatLookahead) -> None:
    events = llm.astream_events("q", version="v2")
    async for event in events:
        if event["event"] == "on_chat_model_stream":
            break
    await events.aclose()  # type: ignore[attr-defined]


async def cancelled(llm: ChatLookahead) -> None:
    calls = [asyncio.create_task(llm.ainvoke("q")) for _ in range(5)]
    await becomes(lambda: running(llm) > 0)
    for call in calls:
        call.cancel()
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call


async def timed_out(llm: ChatLookahead) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await llm.abatch(["a", "b"])


async def timed_out_in_a_form(llm: ChatLookahead) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await llm.with_structured_output(SCHEMA).ainvoke("q")


async def broken_by_a_callback(llm: ChatLookahead) -> None:
    with pytest.raises(BreakingError):
        async for _ in llm.astream("q", config={"callbacks": [Breaks()]}):
            pass


async def broken_by_another_node(llm: ChatLookahead) -> None:
    async def writes(_: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke("q")]}

    async def breaks(_: MessagesState) -> dict[str, Any]:
        await becomes(lambda: running(llm) > 0)
        raise BreakingError

    graph = StateGraph(MessagesState)
    for node in (writes, breaks):
        graph.add_node(node.__name__, node)
        graph.add_edge(START, node.__name__)
    with pytest.raises(BreakingError):
        await graph.compile().ainvoke({"messages": []})


@pytest.mark.parametrize(
    "end",
    [
        left,
        left_in_a_thread,
        left_by_events,
        cancelled,
        timed_out,
        timed_out_in_a_form,
        broken_by_a_callback,
        broken_by_another_node,
    ],
)
async def test_no_request_stays(llm: ChatLookahead, end: Callable[[ChatLookahead], Awaitable[None]]) -> None:
    await end(llm)
    await becomes(lambda: running(llm) == 0)
    assert (await llm.ainvoke("q", max_tokens=3)).text.startswith("One")
