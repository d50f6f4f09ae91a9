"""Templates return the same in `invoke` and `ainvoke`, and cancellation ends their requests and tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead
from lookahead_agent.agents import templates
from lookahead_agent.agents.new_project import PROJECTS, project_tools, scripted_project_replies
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.testing import scripted_chat, scripted_replies
from tests.waiting import wait_until
from tools.calculator import calculator

TOOLS: dict[str, Any] = {"reflection": [], "self_consistency": [], "supervisor": {"calculator_expert": [calculator]}}


def build(name: str, llm: ChatLookahead, tools: Any = None, **options: Any) -> Any:
    return getattr(templates, f"build_{name}")(llm, tools or TOOLS.get(name, [calculator]), **options)


def slow_chat() -> ChatLookahead:
    tokenizer = ScriptedTokenizer()
    engines = EngineSet(ScriptedEngine(tokenizer, lambda prompt, written: [ScriptedStep("So.", 60.0)]))
    return ChatLookahead(engines=engines, policy="off", temperature=0.5)


INPUT: Any = {"messages": [("human", "How much does it earn?")]}


@pytest.mark.parametrize("name", PROJECTS)
async def test_invoke_and_ainvoke_return_the_same_messages(name: str) -> None:
    replies = scripted_project_replies(name, [project_tools()["calculator"]])
    states = []
    for asynchronous in (True, False):
        graph = build(name, scripted_chat(scripted_replies(**replies), policy="off", temperature=0.5))
        # `invoke` must work within a running event loop.
        state = await graph.ainvoke(INPUT) if asynchronous else graph.invoke(INPUT)
        assert state["messages"][-1].text == replies["You_answer"]
        states.append([(message.type, message.text) for message in state["messages"]])
    assert states[0] == states[1]


@pytest.mark.parametrize("name", PROJECTS)
async def test_step_timeout_leaves_no_request_in_the_engine(name: str) -> None:
    llm = slow_chat()
    assert llm.engines is not None
    graph, target = build(name, llm), llm.engines.target
    for graph.step_timeout in (1.0, 30.0):  # a loaded machine may need the longer one to start the request
        with pytest.raises(TimeoutError):
            await graph.ainvoke(INPUT)
        if target.requests:  # type: ignore[attr-defined]
            break
    assert target.requests  # type: ignore[attr-defined]
    await wait_until(lambda: target.in_flight == 0)


async def test_cancelled_graph_leaves_no_request_in_the_engine() -> None:
    llm = slow_chat()
    assert llm.engines is not None
    target = llm.engines.target
    task = asyncio.ensure_future(build("react", llm).ainvoke(INPUT))
    await wait_until(lambda: target.in_flight == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: target.in_flight == 0)


tool_events: list[str] = []


@tool
async def look_up(name: str) -> str:
    """Look a name up."""
    tool_events.append(name)
    try:
        await asyncio.sleep(0 if name == "quick" else 600)
    except asyncio.CancelledError:
        tool_events.append("cancelled")
        raise
    return "It is 7."


def graph_with_one_call(template: str, name: str) -> Any:
    """A graph that calls the tool once."""
    call = f'{{"name": "look_up", "arguments": {{"name": "{name}"}}}}'
    script = {
        "You_solve": f'Plan:\n1. look_up("{name}")',
        "You_carry_out": [call, '{"name": "ready_to_answer", "arguments": {}}'],
        "You_answer": "7.",
    }
    return build(template, scripted_chat(scripted_replies(**script), policy="off"), tools=[look_up])


@pytest.mark.parametrize("name", ["react", "llm_compiler"])
async def test_cancelled_graph_cancels_its_async_tool(name: str) -> None:
    """`llm_compiler` starts the call while the planner is still writing."""
    assert (await graph_with_one_call(name, "quick").ainvoke(INPUT))["messages"][-1].text == "7."
    tool_events.clear()
    task = asyncio.ensure_future(graph_with_one_call(name, "slow").ainvoke(INPUT))
    await wait_until(lambda: tool_events == ["slow"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: tool_events == ["slow", "cancelled"])


@pytest.mark.parametrize("name", ["react", "llm_compiler"])
def test_async_tool_works_in_invoke(name: str) -> None:
    assert graph_with_one_call(name, "quick").invoke(INPUT)["messages"][-1].text == "7."
