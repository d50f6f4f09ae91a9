"""Templates give the same awaited and not, and what is cancelled is ended."""

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
from tests.waiting import becomes
from tools.calculator import calculator

TOOLS: dict[str, Any] = {"reflection": [], "self_consistency": [], "supervisor": {"calculator_expert": [calculator]}}


def build(name: str, llm: ChatLookahead, tools: Any = None, **options: Any) -> Any:
    return getattr(templates, f"build_{name}")(llm, tools or TOOLS.get(name, [calculator]), **options)


def slow() -> ChatLookahead:
    tokenizer = ScriptedTokenizer()
    engines = EngineSet(ScriptedEngine(tokenizer, lambda prompt, begun: [ScriptedStep("So.", 60.0)]))
    return ChatLookahead(engines=engines, policy="off", temperature=0.5)


ASKED: Any = {"messages": [("human", "How much does it earn?")]}


@pytest.mark.parametrize("name", PROJECTS)
async def test_a_graph_comes_to_the_same_both_ways(name: str) -> None:
    replies = scripted_project_replies(name, [project_tools()["calculator"]])
    states = []
    for awaited in (True, False):
        graph = build(name, scripted_chat(scripted_replies(**replies), policy="off", temperature=0.5))
        # Not awaited within an event loop, too.
        state = await graph.ainvoke(ASKED) if awaited else graph.invoke(ASKED)
        assert state["messages"][-1].text == replies["You_answer"]
        states.append([(message.type, message.text) for message in state["messages"]])
    assert states[0] == states[1]


@pytest.mark.parametrize("name", PROJECTS)
async def test_a_node_that_takes_too_long_leaves_no_request(name: str) -> None:
    llm = slow()
    assert llm.engines is not None
    graph = build(name, llm)
    graph.step_timeout = 1.0  # LangGraph's own
    with pytest.raises(TimeoutError):
        await graph.ainvoke(ASKED)
    target = llm.engines.target
    assert target.requests  # type: ignore[attr-defined]
    await becomes(lambda: target.in_flight == 0)


async def test_a_cancelled_graph_leaves_no_request() -> None:
    llm = slow()
    assert llm.engines is not None
    target = llm.engines.target
    running = asyncio.ensure_future(build("react", llm).ainvoke(ASKED))
    await becomes(lambda: target.in_flight == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await becomes(lambda: target.in_flight == 0)


started: list[str] = []


@tool
async def look_up(name: str) -> str:
    """Look a name up."""
    started.append(name)
    try:
        await asyncio.sleep(0 if name == "quick" else 600)
    except asyncio.CancelledError:
        started.append("cancelled")
        raise
    return "It is 7."


def caller(template: str, name: str) -> Any:
    """A graph that calls the tool once."""
    call = f'{{"name": "look_up", "arguments": {{"name": "{name}"}}}}'
    script = {
        "You_solve": f'Plan:\n1. look_up("{name}")',
        "You_carry_out": [call, '{"name": "ready_to_answer", "arguments": {}}'],
        "You_answer": "7.",
    }
    return build(template, scripted_chat(scripted_replies(**script), policy="off"), tools=[look_up])


@pytest.mark.parametrize("name", ["react", "llm_compiler"])
async def test_a_tool_may_be_a_coroutine_that_is_cancelled(name: str) -> None:
    """A call of `llm_compiler` begins while the planner still writes."""
    assert (await caller(name, "quick").ainvoke(ASKED))["messages"][-1].text == "7."
    started.clear()
    running = asyncio.ensure_future(caller(name, "slow").ainvoke(ASKED))
    await becomes(lambda: started == ["slow"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await becomes(lambda: started == ["slow", "cancelled"])


@pytest.mark.parametrize("name", ["react", "llm_compiler"])
def test_a_tool_that_is_a_coroutine_works_without_an_event_loop_of_the_callers(name: str) -> None:
    assert caller(name, "quick").invoke(ASKED)["messages"][-1].text == "7."
