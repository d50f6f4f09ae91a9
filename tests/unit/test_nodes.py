"""Templates give the same awaited and not, and what is cancelled is ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.tools import tool
from langgraph.errors import NodeTimeoutError
from langgraph.types import TimeoutPolicy

from lookahead_agent import ChatLookahead
from lookahead_agent.agents import templates
from lookahead_agent.agents.metrics import Budget
from lookahead_agent.agents.new_project import PROJECTS
from lookahead_agent.agents.nodes import model_node, tool_node
from lookahead_agent.agents.tool_use import ToolOutcome
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.testing import scripted_chat, scripted_replies
from tests.waiting import becomes
from tools.calculator import calculator

TOOLS: dict[str, Any] = {"reflection": [], "self_consistency": [], "supervisor": {"calculator": [calculator]}}


def build(name: str, llm: ChatLookahead, tools: Any = None, **options: Any) -> Any:
    return getattr(templates, f"build_{name}")(llm, tools or TOOLS.get(name, [calculator]), **options)


def slow() -> ChatLookahead:
    tokenizer = ScriptedTokenizer()
    engines = EngineSet(ScriptedEngine(tokenizer, lambda prompt, begun: [ScriptedStep("So.", 60.0)]))
    return ChatLookahead(engines=engines, policy="off", temperature=0.5)


WITH_BUDGET = [name for name, project in PROJECTS.items() if project.given != "messages"]


def asked(name: str) -> dict[str, Any]:
    question = "How much does it earn?"
    return {"question": question} if name in WITH_BUDGET else {"messages": [("human", question)]}


@pytest.mark.parametrize("name", PROJECTS)
async def test_a_graph_comes_to_the_same_both_ways(name: str) -> None:
    project = PROJECTS[name]
    task = asked(name)
    states = []
    for awaited in (True, False):
        graph = build(name, scripted_chat(scripted_replies(**project.script), policy="off", temperature=0.5))
        # Not awaited within an event loop, too.
        state = await graph.ainvoke(task) if awaited else graph.invoke(task)
        if name in WITH_BUDGET:
            assert state["usage"].pop("seconds") > 0
            assert state["answer"] == project.answer
        else:
            assert state["messages"][-1].text == project.answer.replace("\\n", "\n")
            state = [(message.type, message.text) for message in state["messages"]]
        states.append(state)
    assert states[0] == states[1]


@pytest.mark.parametrize("name", PROJECTS)
async def test_a_node_that_takes_too_long_leaves_no_request(name: str) -> None:
    llm = slow()
    assert llm.engines is not None
    if name in WITH_BUDGET:
        graph = build(name, llm, budget=Budget(node_timeout=1.0))
    else:
        graph = build(name, llm)
        graph.step_timeout = 1.0  # LangGraph's own
    with pytest.raises((NodeTimeoutError, TimeoutError)):
        await graph.ainvoke(asked(name))
    target = llm.engines.target
    assert target.requests  # type: ignore[attr-defined]
    await becomes(lambda: target.in_flight == 0)


async def test_a_cancelled_graph_leaves_no_request() -> None:
    llm = slow()
    assert llm.engines is not None
    target = llm.engines.target
    running = asyncio.ensure_future(build("react", llm).ainvoke(asked("react")))
    await becomes(lambda: target.in_flight == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await becomes(lambda: target.in_flight == 0)


def test_only_graphs_that_are_awaited_have_time_outs() -> None:
    graph = build("rewoo", scripted_chat("x"), budget=Budget(node_timeout=TimeoutPolicy(idle_timeout=5)))
    with pytest.raises(ValueError, match="only supported for async nodes"):
        graph.invoke({"question": "How much?"})
    with pytest.raises(ValueError, match="run_timeout must be greater than 0"):
        Budget(node_timeout=-1)


cancelled: list[str] = []


@tool
async def look_up(name: str) -> str:
    """Look a name up."""
    try:
        await asyncio.sleep(0 if name == "quick" else 60)
    except asyncio.CancelledError:
        cancelled.append(name)
        raise
    return "It is 7."


async def test_a_tool_may_be_a_coroutine() -> None:
    for looked_up in ("quick", "slow"):
        script = {"You_plan": f'Plan:\n1. look_up("{looked_up}")', "You_finish": "7."}
        llm = scripted_chat(scripted_replies(**script), policy="off")
        budget = Budget(node_timeout=None if looked_up == "quick" else 0.3)
        graph = templates.build_llm_compiler(llm, [look_up], budget=budget)
        cancelled.clear()
        if looked_up == "quick":
            assert (await graph.ainvoke({"question": "?"}))["answer"] == "7."
            continue
        with pytest.raises(NodeTimeoutError):
            await graph.ainvoke({"question": "?"})
        assert set(cancelled) == {"slow"}


async def test_an_agents_tool_may_be_a_coroutine_that_is_cancelled() -> None:
    ready = '{"name": "ready_to_answer", "arguments": {}}'
    for looked_up in ("quick", "slow"):
        call = f'{{"name": "look_up", "arguments": {{"name": "{looked_up}"}}}}'
        script = {"You_think": "I look it up.", "You_carry_out": [call, ready], "You_answer": "7."}
        graph = build("react", scripted_chat(scripted_replies(**script), policy="off"), tools=[look_up])
        cancelled.clear()
        if looked_up == "quick":
            assert (await graph.ainvoke(asked("react")))["messages"][-1].text == "7."
            continue
        graph.step_timeout = 1.0
        with pytest.raises(TimeoutError):
            await graph.ainvoke(asked("react"))
        assert set(cancelled) == {"slow"}


def test_a_reply_that_is_known_is_not_asked_for() -> None:
    llm = scripted_chat("Asked.", policy="off")
    node = model_node(
        llm, lambda known: AIMessage("Known.") if known else [HumanMessage("?")], lambda _, reply: {"text": reply.text}
    )
    for known, steps in ((True, 0), (False, 1)):
        for update in (node.invoke(known), asyncio.run(node.ainvoke(known))):
            assert update["text"] == ("Known." if known else "Asked.")
            assert update["usage"]["steps"] == steps


def test_an_outcome_that_is_known_is_no_call() -> None:
    known = ToolOutcome("known", failed=True)
    call = ToolCall(name="calculator", args={"expression": "1 + 1"}, id=None)
    node = tool_node({"calculator": calculator}, lambda _: [known, call], lambda _, outcomes: {"outcomes": outcomes})
    for update in (node.invoke(None), asyncio.run(node.ainvoke(None))):
        assert update["outcomes"] == [known, ToolOutcome("2", failed=False)]
        assert update["usage"]["steps"] == 2
