"""The template whose tools run while the plan is written, on a model that follows a script."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from graphs.llm_compiler import build_llm_compiler
from lookahead_agent.agents.metrics import Budget, NodeMetrics
from lookahead_agent.testing import scripted_replies
from tests.unit.chat import scripted_chat
from tools.calculator import calculator

PLAN = 'I add them.\n\nPlan:\n1. calculator("2 * 3")\n2. calculator("4 * 5")\n3. calculator("$1 + $2")'
CONFIG: Any = {"configurable": {"thread_id": "1"}}
made: list[str] = []


@tool
def look_up(name: str) -> str:
    """Look something up."""
    made.append(name)
    return f"found {name}"


@tool
def sign(paper: str) -> str:
    """Sign a paper."""
    made.append(paper)
    return "signed"


@tool
def ask_somebody(question: str) -> str:
    """Ask a person."""
    made.append(question)
    return str(interrupt(question))


@tool
def flaky(text: str) -> str:
    """Look something up."""
    made.append(text)
    if made.count(text) == 1:
        raise ConnectionError("lost")
    return "found"


@pytest.fixture(autouse=True)
def _nothing_made() -> None:
    made.clear()


def model(plan: str | list[str], answer: str | list[str] = "It is done.", **fields: Any) -> Any:
    return scripted_chat(scripted_replies(You_plan=plan, You_finish=answer), **fields)


def test_it_plans_calls_and_joins() -> None:
    llm = model(PLAN, "It is 26.", policies={"planner": "exact", "joiner": "off"})
    graph = build_llm_compiler(llm, [calculator])
    llm.check_policies(graph)
    figures = NodeMetrics()
    state = graph.invoke({"question": "How much?"}, {"callbacks": [figures]})
    assert [result["output"] for result in state["results"]] == ["6", "20", "26"]
    assert state["results"][2]["call"]["arguments"] == {"expression": "6 + 20"}
    assert (state["answer"], state["plans"], state["missing"], state["stopped"]) == ("It is 26.", 1, "", "")
    assert state["usage"]["steps"] == 5
    assert {node["node"]: node["policy"] for node in figures.nodes()} == {"planner": "exact", "joiner": "off"}


def test_lines_may_be_calculations_in_words() -> None:
    plan = "1. Pens: 2 * 3\n2. Money: $4 * 5\n3. All: result 1 + result 2\n4. Left: 3 - 5\n5. Squared: step 4 ^ 2"
    state = build_llm_compiler(model(plan, "It is 26."), [calculator]).invoke({"question": "?"})
    assert [result["output"] for result in state["results"]] == ["6", "20", "26", "-2", "4"]
    assert state["plans"] == 1
    without = build_llm_compiler(model(plan), [calculator], calculate=False, max_plans=1).invoke({"question": "?"})
    assert without["plan"] == []


def test_what_a_planner_with_only_a_calculator_is_told() -> None:
    asked: list[str] = []

    def target(prompt: str) -> str:
        asked.append(prompt)
        return "1. Pens: 2 * 3" if "You plan" in prompt else "It is 6."

    llm = scripted_chat(target, policy="off")
    for tools, more in (([calculator], {}), ([calculator, look_up], {}), ([calculator], {"calculate": False})):
        build_llm_compiler(llm, tools, max_plans=1, **more).invoke({"question": "?"})
    worked, *others = [prompt for prompt in asked if "You plan" in prompt]
    assert "Tom runs 4 miles" in worked
    assert all("with tools, of which there are" in prompt for prompt in others)


class Slow(BaseChatModel):
    """Writes a plan whose second line comes only when the tool of the first has ended."""

    ended: Any

    @property
    def _llm_type(self) -> str:
        return "slow"

    def _stream(self, messages: Any, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=AIMessageChunk('1. note("a")\n2. no'))
        assert self.ended.wait(10), "the first call did not start before the plan was complete"
        yield ChatGenerationChunk(message=AIMessageChunk('te("$1")'))

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("Done."))])


def test_a_tool_runs_while_the_plan_is_written() -> None:
    ended = threading.Event()

    @tool
    def note(text: str) -> str:
        """Write a note."""
        ended.set()
        return f"{text}!"

    state = build_llm_compiler(Slow(ended=ended), [note]).invoke({"question": "?"})
    assert [result["output"] for result in state["results"]] == ["a!", "a!!"]


async def test_asynchronously_and_many_at_once() -> None:
    graph = build_llm_compiler(model(PLAN, "It is 26."), [calculator])
    states = await graph.abatch([{"question": f"How much is {number}?"} for number in range(12)])
    assert [state["results"][2]["output"] for state in states] == ["26"] * 12


def test_it_plans_anew_after_what_failed_and_what_is_missing() -> None:
    failing = 'Plan:\n1. calculator("1 / 0")\n2. calculator("$1 + 1")\n3. calculator("2 + 2")'
    state = build_llm_compiler(model([failing, PLAN], "It is 26."), [calculator]).invoke({"question": "?"})
    assert [(result["call"]["plan"], result["failed"]) for result in state["results"]] == [
        (1, True), (1, False), (2, False), (2, False), (2, False),
    ]  # fmt: skip
    assert (state["answer"], state["plans"]) == ("It is 26.", 2)
    asked = model([PLAN, 'Plan:\n1. calculator("26 * 2")'], ["Missing: twice that.", "It is 52."])
    state = build_llm_compiler(asked, [calculator]).invoke({"question": "?"})
    assert (state["answer"], state["plans"], state["results"][-1]["output"]) == ("It is 52.", 2, "52")
    never = model("I do not know how.", "I could not find out.")
    state = build_llm_compiler(never, [calculator], max_plans=3).invoke({"question": "?"})
    assert (state["answer"], state["plans"], state["results"]) == ("I could not find out.", 3, [])
    wrong = model('1. oracle("x")\n2. calculator(sum=1, product=2)')
    state = build_llm_compiler(wrong, [calculator], max_plans=1).invoke({"question": "?"})
    assert "there is no tool oracle" in state["results"][0]["output"]
    assert "wrong arguments" in state["results"][1]["output"]


def test_limits_end_in_an_answer() -> None:
    plan = "\n".join(f'{number}. calculator("{number} + 1")' for number in range(1, 30))
    graph = build_llm_compiler(model(plan, "At least 2."), [calculator], budget=Budget(steps=6))
    state = graph.invoke({"question": "?"})
    assert state["answer"] == "At least 2."
    assert state["stopped"] == "the limit of 6 steps is reached"
    assert len(state["results"]) <= 6


def test_it_asks_before_a_tool_and_goes_on_without_repeating_anything() -> None:
    plan = 'Plan:\n1. look_up("rent")\n2. sign("$1")\n3. look_up("after $2")\n4. look_up("tax")'
    for decision, signed in ((True, ["found rent"]), ("not now", [])):
        made.clear()
        tools = [look_up, sign]
        graph = build_llm_compiler(model(plan), tools, InMemorySaver(), ask_before=["sign"], max_plans=1)
        waiting = graph.invoke({"question": "Sign it."}, CONFIG)
        (question,) = waiting["__interrupt__"]
        assert question.value["arguments"] == {"paper": "found rent"}
        assert sorted(made) == ["rent", "tax"], "what needs no answer is done meanwhile"
        state = graph.invoke(Command(resume=decision), CONFIG)
        assert sorted(made) == sorted(["rent", "tax", *signed, *(["after signed"] if signed else [])])
        assert state["plans"] == 1
        assert state["answer"] == "It is done."
    for arguments in ({"ask_before": ["oracle"]}, {"ask_before": ["sign"]}):
        with pytest.raises(ValueError, match=r"there are not|checkpointer"):
            build_llm_compiler(model(plan), [sign], **arguments)  # type: ignore[arg-type]


def test_a_tool_that_asks_by_itself_waits_in_a_node_of_the_graph() -> None:
    plan = '1. look_up("a")\n2. ask_somebody("Which?")\n3. look_up("$2")'
    graph = build_llm_compiler(model(plan), [look_up, ask_somebody], InMemorySaver())
    assert graph.invoke({"question": "?"}, CONFIG)["__interrupt__"][0].value == "Which?"
    state = graph.invoke(Command(resume="this one"), CONFIG)
    assert [result["output"] for result in state["results"]] == ["found a", "this one", "found this one"]
    assert made.count("a") == 1


def test_a_tool_that_loses_its_connection_is_tried_again_without_planning_again() -> None:
    state = build_llm_compiler(model('1. look_up("a")\n2. flaky("b")\n3. look_up("$2")'), [look_up, flaky]).invoke(
        {"question": "?"}
    )
    assert (made, state["plans"]) == (["a", "b", "b", "found"], 1)


def test_a_run_that_is_killed_in_the_middle_of_a_round_repeats_only_what_was_killed() -> None:
    killed = [True]

    @tool
    def fragile(text: str) -> str:
        """End the process, once."""
        made.append(text)
        if killed:
            raise KeyboardInterrupt
        return "whole"

    plan = '1. sign("b")\n2. fragile("a")'
    graph = build_llm_compiler(model(plan), [fragile, sign], InMemorySaver(), ask_before=["sign", "fragile"])
    assert graph.invoke({"question": "?"}, CONFIG)["__interrupt__"]
    questions = graph.get_state(CONFIG).interrupts
    with pytest.raises(KeyboardInterrupt):
        graph.invoke(Command(resume={question.id: True for question in questions}), CONFIG)
    killed.clear()
    state = graph.invoke(None, CONFIG)
    assert [result["output"] for result in state["results"]] == ["signed", "whole"]
    assert state["plans"] == 1


def test_a_call_that_breaks_is_planned_around() -> None:
    @tool
    def fragile(text: str) -> str:
        """Break."""
        raise RuntimeError("broken")

    plans = ['1. fragile("a")\n2. look_up("$1")', '1. look_up("b")']
    state = build_llm_compiler(model(plans, "It is b."), [fragile, look_up]).invoke({"question": "?"})
    assert [(result["output"], result["failed"]) for result in state["results"]] == [
        ("RuntimeError: broken", True),
        ("found b", False),
    ]
    assert state["answer"] == "It is b."


def test_what_cannot_work_is_said() -> None:
    with pytest.raises(ValueError, match="at least one tool"):
        build_llm_compiler(model(PLAN), [])
    with pytest.raises(ValueError, match="at least 1"):
        build_llm_compiler(model(PLAN), [calculator], max_plans=0)
