"""Lines of plans as calls, and calls that start before their plan is complete."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.tools import tool
from langgraph.errors import GraphInterrupt

from lookahead_agent.agents.planned_calls import EarlyCalls, PlannedCall, fill_references, read_call, references
from lookahead_agent.agents.tool_use import ToolOutcome
from tools.calculator import calculator


@tool
def search(query: str, most: int = 3) -> str:
    """Search."""
    return f"{most} of {query}"


TOOLS = {"calculator": calculator, "search": search}


@pytest.mark.parametrize(
    ("line", "number", "arguments"),
    [
        ('1. calculator("12 * 1.50")', 1, {"expression": "12 * 1.50"}),
        ("**2.** `calculator(3 * 20)`", 2, {"expression": "3 * 20"}),
        ('  3) calculator(expression="$1 + $2")', 3, {"expression": "$1 + $2"}),
        ("- $4 = calculator($1 + $2)", 4, {"expression": "$1 + $2"}),
        ('5. search("a, b", most=2)', 5, {"query": "a, b", "most": 2}),
        ("6. search($1, 2)", 6, {"query": "$1", "most": 2}),
        ('7. calculator("x) and (y")  # the rest', 7, {"expression": "x) and (y"}),
        ('8. calculator("never closed)', 8, {"expression": "never closed"}),
        ("9. search(['a', \"$1\"])", 9, {"query": ["a", "$1"]}),
        ("10. oracle(1, 2)", 10, {"argument 1": 1, "argument 2": 2}),
        ("11. search()", 11, {}),
        ("12. search(**everything)", 12, {"query": "**everything"}),
    ],
)
def test_lines_that_are_calls(line: str, number: int, arguments: dict[str, Any]) -> None:
    call = read_call(line, TOOLS, plan=2)
    assert call is not None
    assert (call["plan"], call["number"], call["arguments"]) == (2, number, arguments)


@pytest.mark.parametrize(
    "line", ["", "Plan:", "1. Cost of the pens: 12 * 3 (dollars)", "calculator(1)", "Add 1. then (2)"]
)
def test_lines_that_are_thoughts(line: str) -> None:
    assert read_call(line, TOOLS) is None


def planned(number: int, text: Any, name: str = "calculator") -> PlannedCall:
    return PlannedCall(plan=1, number=number, tool=name, arguments={"expression": text})


def test_results_take_the_place_of_earlier_numbers_and_of_nothing_else() -> None:
    call = planned(3, "$1 + ${2} + $3 + $12 + $1.50 + $2,000")
    assert references(call) == {1, 2}
    assert fill_references(call, {1: "5", 2: "$1"})["arguments"] == {"expression": "5 + $1 + $3 + $12 + $1.50 + $2,000"}
    nested = planned(2, {"a": ["$1", 7], "b": None})
    assert references(nested) == {1}
    assert fill_references(nested, {1: "x"})["arguments"] == {"expression": {"a": ["x", 7], "b": None}}


@given(st.text(max_size=80), st.integers(1, 99))
def test_whatever_a_model_writes_is_read_or_left(text: str, number: int) -> None:
    for line in (text, f"{number}. calculator({text})"):
        call = read_call(line, TOOLS)
        if call is not None:
            assert all(1 <= earlier < call["number"] for earlier in references(call))
            fill_references(call, dict.fromkeys(references(call), "0"))


async def test_a_call_starts_while_the_plan_is_written_and_as_soon_as_what_it_needs_is_there() -> None:
    second_may_end, third_ended = threading.Event(), threading.Event()
    begun: list[int] = []

    def carry_out(call: PlannedCall) -> ToolOutcome:
        begun.append(call["number"])
        if call["number"] == 2:
            assert second_may_end.wait(10)
        if call["number"] == 3:
            third_ended.set()
        return ToolOutcome(str(call["arguments"]["expression"]), failed=False)

    async with EarlyCalls(carry_out, most=10) as early:
        for call in (planned(1, "a"), planned(2, "b"), planned(3, "$1!"), planned(4, "$2 $3")):
            early.add(call)
        assert third_ended.wait(10), "it needs the first call only"
        assert 4 not in begun
        second_may_end.set()
    assert [result["output"] for result in early.results] == ["a", "b", "a!", "b a!"]


async def test_what_fails_raises_asks_or_is_for_later_starts_nothing_after_it() -> None:
    def carry_out(call: PlannedCall) -> ToolOutcome:
        match call["number"]:
            case 1:
                return ToolOutcome("broken", failed=True)
            case 3:
                raise ConnectionError("lost")
            case 5:
                raise GraphInterrupt
        return ToolOutcome("well", failed=False)

    async with EarlyCalls(carry_out, most=10, later=["search"]) as early:
        for number in (1, 3, 5, 7):
            early.add(planned(number, "x", "search" if number == 7 else "calculator"))
            early.add(planned(number + 1, f"${number}"))
        early.add(planned(9, "x"))
    assert {result["call"]["number"]: result["failed"] for result in early.results} == {1: True, 9: False}


async def test_no_more_calls_are_started_than_may_be_and_none_after_an_error() -> None:
    def carry_out(call: PlannedCall) -> ToolOutcome:
        return ToolOutcome("well", failed=False)

    async with EarlyCalls(carry_out, most=2) as early:
        for number in range(1, 6):
            early.add(planned(number, f"${number - 1}" if number > 1 else "x"))
    assert [result["call"]["number"] for result in early.results] == [1, 2]
    threads = threading.active_count()
    early = EarlyCalls(carry_out, most=2)
    error = KeyError("the model failed")
    early.add(planned(1, "x"))
    early.__exit__(KeyError, error, None)
    assert threading.active_count() <= threads
