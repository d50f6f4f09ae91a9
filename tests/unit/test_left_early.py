"""A call that is abandoned, cancelled, timed out or interrupted by an error leaves no request in the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler
from langgraph.graph import START, MessagesState, StateGraph

from lookahead_agent import ChatLookahead
from lookahead_agent.generation.backend import ChatReply, GenerateEvent, TextDelta
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.system import background
from lookahead_agent.testing import scripted_chat
from tests.waiting import wait_until

SCHEMA = {"title": "Found", "type": "object", "properties": {"word": {"type": "string"}}}


@pytest.fixture(params=["off", "exact:depth=4"])
def llm(request: pytest.FixtureRequest) -> ChatLookahead:
    """A model whose replies take minutes."""
    return scripted_chat("One word after another.\n\n" * 2000, policy=request.param, max_tokens=1_000_000)


def requests_in_flight(llm: ChatLookahead) -> int:
    """The number of requests in both engines."""
    engines = llm.engines
    assert engines is not None
    assert engines.draft is not None
    return engines.target.in_flight + engines.draft.in_flight


class InterruptingError(Exception):
    """An error that interrupts a call."""


class FailingHandler(AsyncCallbackHandler):
    """A callback that fails at the first token."""

    raise_error = True

    async def on_llm_new_token(self, *_: Any, **__: Any) -> None:
        raise InterruptingError


async def abandon_astream(llm: ChatLookahead) -> None:
    async for _ in llm.astream("q"):
        break


async def abandon_stream_in_a_thread(llm: ChatLookahead) -> None:
    def iterate() -> None:
        for _ in llm.stream("q"):
            break

    await asyncio.to_thread(iterate)


async def abandon_event_stream(llm: ChatLookahead) -> None:
    events = llm.astream_events("q", version="v2")
    async for event in events:
        if event["event"] == "on_chat_model_stream":
            break
    await events.aclose()  # type: ignore[attr-defined]


async def cancel_calls(llm: ChatLookahead) -> None:
    calls = [asyncio.create_task(llm.ainvoke("q")) for _ in range(5)]
    await wait_until(lambda: requests_in_flight(llm) > 0)
    for call in calls:
        call.cancel()
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call


async def time_out(llm: ChatLookahead, call: Awaitable[Any]) -> None:
    """Await a call with a timeout that passes once an engine has a request."""
    task = asyncio.ensure_future(call)
    await wait_until(lambda: requests_in_flight(llm) > 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 0)


async def time_out_batch(llm: ChatLookahead) -> None:
    await time_out(llm, llm.abatch(["a", "b"]))


async def time_out_structured_output(llm: ChatLookahead) -> None:
    await time_out(llm, llm.with_structured_output(SCHEMA).ainvoke("q"))


async def fail_in_a_callback(llm: ChatLookahead) -> None:
    with pytest.raises(InterruptingError):
        async for _ in llm.astream("q", config={"callbacks": [FailingHandler()]}):
            pass


async def fail_in_another_node(llm: ChatLookahead) -> None:
    async def generate(_: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke("q")]}

    async def fail(_: MessagesState) -> dict[str, Any]:
        await wait_until(lambda: requests_in_flight(llm) > 0)
        raise InterruptingError

    graph = StateGraph(MessagesState)
    for node in (generate, fail):
        graph.add_node(node.__name__, node)
        graph.add_edge(START, node.__name__)
    with pytest.raises(InterruptingError):
        await graph.compile().ainvoke({"messages": []})


@pytest.mark.parametrize(
    "abort",
    [
        abandon_astream,
        abandon_stream_in_a_thread,
        abandon_event_stream,
        cancel_calls,
        time_out_batch,
        time_out_structured_output,
        fail_in_a_callback,
        fail_in_another_node,
    ],
)
async def test_abort_leaves_no_request(llm: ChatLookahead, abort: Callable[[ChatLookahead], Awaitable[None]]) -> None:
    await abort(llm)
    await wait_until(lambda: requests_in_flight(llm) == 0)
    assert (await llm.ainvoke("q", max_tokens=3)).text.startswith("One")


def test_events_of_a_backend_end_with_the_reply() -> None:
    llm = scripted_chat("One.\n\nTwo.", policy="exact:depth=4")

    async def read() -> list[GenerateEvent]:
        async with aclosing(llm.backend.generate(llm.request("q", CallOptions()))) as events:
            return [event async for event in events]

    *events, reply = background.run(read())
    assert isinstance(reply, ChatReply)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == reply.content == "One.\n\nTwo."
