from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver

from graphs.plan_execute import build_plan_execute, needs_up_to, parse_plan
from lookahead_agent.agents.metrics import Budget, NodeMetrics
from lookahead_agent.agents.templates import template
from tests.unit.chat import is_for_a_planner, scripted_chat
from tools.calculator import calculator

asked_executor = partial(build_plan_execute, calculate=False)
"""The graph whose executor is asked of each step, also of calculations."""
THOUGHT = "There are pens and books.\n\nPlan:\n1. Pens: 2 * 3\n2. All: result 1 + 4"


def thinker(calls: list[str], plan: str = THOUGHT) -> Any:
    """A model that plans, makes the given calls one after another, and answers."""
    left = list(calls)

    def target(prompt: str) -> str:
        if is_for_a_planner(prompt):
            return plan
        if "You carry out" in prompt:
            return left.pop(0)
        return "It is " + prompt.split("= ")[-1].strip() + "."

    return scripted_chat(target, policies={"planner": "exact", "executor": "off"})


def call(expression: str) -> str:
    return f'{{"name":"calculator","arguments":{{"expression":"{expression}"}}}}'


def test_plans_calculates_and_answers() -> None:
    figures = NodeMetrics()
    graph = asked_executor(thinker([call("2*3"), call("6+4")]), [calculator])
    state = graph.invoke({"question": "How much?"}, {"callbacks": [figures]})
    assert state["plan"] == ["Pens: 2 * 3", "All: result 1 + 4"]
    assert [result["output"] for result in state["results"]] == ["6", "10"]
    assert state["answer"] == "It is 10."
    nodes = {node["node"]: node for node in figures.nodes()}
    assert {name: node["policy"] for name, node in nodes.items()} == {
        "planner": "exact",
        "executor": "off",
        "finisher": "balanced",
    }
    assert nodes["executor"]["replies"] == 2
    assert nodes["planner"]["accepted"] > 0


def test_plans_anew_after_a_failed_call_up_to_the_limit() -> None:
    graph = asked_executor(thinker([call("1/0")] * 3), [calculator], max_plans=3)
    state = graph.invoke({"question": "How much?"})
    assert state["plans"] == 3
    assert [result["failed"] for result in state["results"]] == [True] * 3
    assert "divides by zero" in state["results"][0]["output"]
    assert state["answer"]


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("I would rather not.", "no tool was called"),
        ('{"name":"oracle","arguments":{}}', "there is no tool oracle"),
        ('<tool_call>{"name":"oracle","arguments":{}}</tool_call>', "there is no tool oracle"),
        ('{"name":"calculator","arguments":{"sum":"1"}}', "wrong arguments"),
    ],
)
def test_bad_calls_are_failed_steps(reply: str, problem: str) -> None:
    graph = asked_executor(thinker([reply]), [calculator], max_plans=1)
    assert problem in graph.invoke({"question": "How much?"})["results"][0]["output"]


def test_the_number_of_steps_is_limited() -> None:
    plan = "Plan:\n" + "\n".join(f"{i}. Add: 1 + {i}" for i in range(1, 30))
    graph = asked_executor(thinker([call("1+1")] * 30, plan), [calculator], max_steps=4)
    assert len(graph.invoke({"question": "How much?"})["results"]) == 4


def test_an_interrupted_run_resumes_by_its_thread(tmp_path: Path) -> None:
    config: Any = {"configurable": {"thread_id": "one"}}
    with SqliteSaver.from_conn_string(str(tmp_path / "state.sqlite")) as saver:
        broken = asked_executor(thinker([call("2*3")]), [calculator], checkpointer=saver)
        with pytest.raises(Exception, match="pop from empty list"):
            broken.invoke({"question": "How much?"}, config)
    with SqliteSaver.from_conn_string(str(tmp_path / "state.sqlite")) as saver:
        mended = asked_executor(thinker([call("6+4")], plan="Not asked again."), [calculator], checkpointer=saver)
        state = mended.invoke(None, config)
    assert [result["output"] for result in state["results"]] == ["6", "10"]
    assert state["plans"] == 1


@pytest.mark.parametrize(
    ("step", "needs"),
    [
        ("Pens: 12 * 1.50", 0),
        ("12 * 1.50", 0),
        ("Price: $3,000 / 2 = (1500)", 0),
        ("All: result 1 + result 2", 2),
        ("All: 4 + Result #1", 1),
        ("Half of step 2: result 2 / 2", 2),
        ("All: the sum", 3),
        ("All: result 1 + the rest", 3),
        ("All: result 9 + 1", 3),
        ("Add them up", 3),
    ],
)
def test_what_a_step_needs(step: str, needs: int) -> None:
    assert needs_up_to(step, 4) == needs


def test_steps_that_need_nothing_of_each_other_are_carried_out_at_once() -> None:
    plan = "Plan:\n1. Pens: 2 * 3\n2. Twice: result 1 * 2\n3. Books: 4 * 5\n4. All: the sum"
    expressions = {"Pens": "2*3", "Twice": "6*2", "Books": "4*5", "All": "12+20"}
    asked: list[str] = []

    def target(prompt: str) -> str:
        if is_for_a_planner(prompt):
            return plan
        if "You carry out" in prompt:
            step = prompt.rsplit("carry out now: ", 1)[1].split(":")[0]
            asked.append(prompt)
            return call(expressions[step])
        return "It is " + prompt.split("= ")[-1].strip() + "."

    graph = asked_executor(scripted_chat(target, policy="off"), [calculator])
    rounds = [sorted(update) for update in graph.stream({"question": "How much?"}, stream_mode="updates")]
    assert [update for update in rounds if update != ["gather"]] == [["planner"], *[["executor"]] * 4, ["finisher"]]
    assert rounds.count(["gather"]) == 3, "the first and the third step are one round"
    state = graph.invoke({"question": "How much?"})
    assert [result["output"] for result in state["results"]] == ["6", "12", "20", "32"], "in the order of the plan"
    assert state["answer"] == "It is 32."
    last = next(prompt for prompt in asked if "now: All" in prompt)
    assert last.index("= 6") < last.index("= 12") < last.index("= 20")


def test_one_of_several_steps_at_once_fails() -> None:
    plans = iter(["Plan:\n1. a: 1 / 0\n2. b: 2 + 2\n3. c: result 1", "Plan:\n1. d: 3 + 3"])

    def target(prompt: str) -> str:
        if is_for_a_planner(prompt):
            return planned["new" if "ran into problems" in prompt else "old"]
        if "You carry out" in prompt:
            return call(prompt.rsplit(": ", 1)[1].split("<")[0].strip().splitlines()[0])
        return "It is 6."

    planned = {"old": next(plans), "new": next(plans)}
    state = asked_executor(scripted_chat(target, policy="off"), [calculator]).invoke({"question": "?"})
    assert [(result["plan"], result["number"], result["failed"]) for result in state["results"]] == [
        (1, 1, True), (1, 2, False), (2, 1, False),
    ]  # fmt: skip
    assert state["answer"] == "It is 6."


def test_a_run_that_broke_among_steps_at_once_repeats_only_what_broke() -> None:
    config: Any = {"configurable": {"thread_id": "one"}}
    saver = InMemorySaver()
    asked: list[str] = []
    broken = [True]

    def target(prompt: str) -> str:
        if is_for_a_planner(prompt):
            return "Plan:\n1. a: 1 + 1\n2. b: 2 + 2"
        if "You carry out" in prompt:
            expression = prompt.rsplit("now: ", 1)[1][3:8]
            asked.append(expression)
            if expression == "2 + 2" and broken:
                raise RuntimeError("broken")
            return call(expression)
        return "Done."

    graph = asked_executor(scripted_chat(target, policy="off"), [calculator], checkpointer=saver)
    with pytest.raises(Exception, match="broken"):
        graph.invoke({"question": "?"}, config)
    broken.clear()
    before = asked.count("1 + 1")
    state = graph.invoke(None, config)
    assert asked.count("1 + 1") == before, "what ended before the break is kept"
    assert [result["output"] for result in state["results"]] == ["2", "4"]


def test_it_needs_tools() -> None:
    with pytest.raises(ValueError, match="at least one tool"):
        asked_executor(thinker([]), [])


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("Plan:\n1. a\n2. b", ["a", "b"]),
        ("1. thought\n\n**Plan:**\n\n1) a\n   more of a\n\n2) b\n\nAnswer: 3", ["a more of a", "b"]),
        ("### Plan\n- a\n- b", ["a", "b"]),
        ("1. a\n2. b", ["a", "b"]),
        ("Plan:\n1. a\n\nCalculation:\n1. c", ["a"]),
        ("no plan at all", []),
    ],
)
def test_parse_plan(text: str, plan: list[str]) -> None:
    assert parse_plan(text) == plan


def test_templates_are_found() -> None:
    assert template("graphs", "plan_execute").parse_plan("1. a") == ["a"]
    with pytest.raises(FileNotFoundError, match="graphs/nonsense"):
        template("graphs", "nonsense")


def test_limits_end_in_an_answer() -> None:
    calls = [call("1+1"), call("1+2")]
    state = asked_executor(thinker(calls), [calculator], budget=Budget(steps=2)).invoke({"question": "?"})
    assert state["stopped"] == "the limit of 2 steps is reached"
    assert len(state["results"]) == 1
    assert state["answer"]
    assert state["usage"]["tokens"] > 0
    state = asked_executor(thinker(calls), [calculator]).invoke({"question": "?"})
    assert state["stopped"] == ""


WORKED = "1. Pens: 2 * 3\n2. Books: 4 x 5 = 20\n3. All: result 1 + result 2"


def calculating(plan: str, calls: list[str] | None = None, asked: list[str] | None = None) -> Any:
    """A model that writes this plan, and makes the calls, one after another."""
    left = list(calls or [])

    def target(prompt: str) -> str:
        if asked is not None:
            asked.append(prompt)
        if is_for_a_planner(prompt):
            return plan
        if "You carry out" in prompt:
            return left.pop(0)
        return "It is " + prompt.split("= ")[-1].strip() + "."

    return scripted_chat(target, policy="off")


def test_steps_that_are_calculations_are_carried_out_as_they_stand() -> None:
    figures, asked = NodeMetrics(), list[str]()
    graph = build_plan_execute(calculating(WORKED, asked=asked), [calculator])
    rounds = [sorted(update) for update in graph.stream({"question": "How much?"}, stream_mode="updates")]
    assert rounds == [["planner"], ["executor"], ["executor"], ["gather"], ["executor"], ["gather"], ["finisher"]]
    assert len(asked) == 2, "the planner and the finisher"
    state = graph.invoke({"question": "How much?"}, {"callbacks": [figures]})
    assert [result["input"]["expression"] for result in state["results"]] == ["2 * 3", "4 * 5", "6 + 20"]
    assert [result["output"] for result in state["results"]] == ["6", "20", "26"]
    assert state["answer"] == "It is 26."
    assert state["usage"]["steps"] == 5, "two replies and three calls"
    assert [node["node"] for node in figures.nodes()] == ["planner", "finisher"]
    limited = build_plan_execute(calculating(WORKED), [calculator], budget=Budget(steps=3)).invoke({"question": "?"})
    assert limited["stopped"] == "the limit of 3 steps is reached"


def test_steps_may_name_others_by_what_they_are_about() -> None:
    plan = "1. Pens: 2 * 3\n2. Price of books: look it up\n3. All: pens + the price of books"
    state = build_plan_execute(calculating(plan, [call("20")]), [calculator]).invoke({"question": "?"})
    assert state["plan"][2] == "All: result 1 + result 2"
    assert [result["output"] for result in state["results"]] == ["6", "20", "26"]
    as_written = build_plan_execute(
        calculating(plan, [call("6"), call("20"), call("1 + 1")]), [calculator], calculate=False
    ).invoke({"question": "?"})
    assert as_written["plan"][2] == "All: pens + the price of books"


def test_of_what_is_no_calculation_the_executor_is_asked() -> None:
    plan = "1. Pens: 2 * 3\n2. All: the pens and 4\n3. None: 1 / 0\n4. More: result 9 + 1"
    calls = [call("6 + 4"), call("0"), call("11")]
    state = build_plan_execute(calculating(plan, calls), [calculator]).invoke({"question": "?"})
    assert sorted(result["output"] for result in state["results"]) == ["0", "10", "11", "6"]
    assert state["plans"] == 1, "a calculation that fails is no failed step: the executor finds out what to do"


def test_a_calculation_of_a_new_plan_takes_results_of_that_plan() -> None:
    plans = iter(["1. a: 1 + 1\n2. b: what is wrong", "1. c: 5 + 5\n2. d: result 1 * 2"])

    def target(prompt: str) -> str:
        if is_for_a_planner(prompt):
            return planned["ran into problems" in prompt]
        return "I cannot." if "You carry out" in prompt else "Done."

    planned = {False: next(plans), True: next(plans)}
    state = build_plan_execute(scripted_chat(target, policy="off"), [calculator]).invoke({"question": "?"})
    assert [(result["plan"], result["output"]) for result in state["results"] if not result["failed"]] == [
        (1, "2"), (2, "10"), (2, "20"),
    ]  # fmt: skip


@tool
def search(query: str) -> str:
    """Find something."""
    return f"found {query}"


def test_beside_other_tools_calculations_are_still_carried_out() -> None:
    asked: list[str] = []

    def target(prompt: str) -> str:
        asked.append(prompt)
        if is_for_a_planner(prompt):
            return "Plan:\n1. Price: look it up\n2. Twice that: result 1 * 2\n3. Six: 2 * 3"
        if "now: Price" in prompt:
            return '{"name":"search","arguments":{"query":"price"}}'
        return call("7 * 2") if "You carry out" in prompt else "Done."

    state = build_plan_execute(scripted_chat(target, policy="off"), [calculator, search]).invoke({"question": "?"})
    assert [result["output"] for result in state["results"]] == ["found price", "14", "6"]
    assert sum("You carry out" in prompt for prompt in asked) == 2, "a result that is no number is for the executor"
