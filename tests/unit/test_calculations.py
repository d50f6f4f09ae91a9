"""Lines of plans that are calculations."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool

from lookahead_agent.agents.calculations import PlanReader, calculation, fill_results, find_calculator
from lookahead_agent.agents.few_shot import DONE, calculation_prompt, plan_examples
from tools.calculator import calculate, calculator


@pytest.mark.parametrize(
    ("line", "expression"),
    [
        ("Cost of the pens: 12 * 1.50", "12 * 1.50"),
        ("12 * 1.50", "12 * 1.50"),
        ("Pens: 12", "12"),
        ("Total cost = result 1 + Result #2.", "result 1 + result 2"),
        ("Total cost: step 1 + 60 = 96", "result 1 + 60"),
        ("12 x 3 = 36", "12 * 3"),
        ("Distance to the farm: 6 + 2 = 8 miles", "6 + 2"),
        ("Paper: 3/4 * 2 = 1.5 square feet.", "3/4 * 2"),
        ("Price: $3,000 / 2", "$3,000 / 2"),
        ("Sold: 240 * 25%", "240 * 25%"),
        ("Rest: (result 1 - 4) ÷ 3", "(result 1 - 4) ÷ 3"),
    ],
)
def test_calculations(line: str, expression: str) -> None:
    assert calculation(line) == expression


@pytest.mark.parametrize(
    "line",
    [
        "Add them up",
        "All: the sum",
        "Cost: 12 pens * 1.50",
        "Sold: 25% of 240",
        "Rest: 12 - 4, then half of it",
        "Cost of 12 pens",
        "12 * 3: the cost of the pens",
        "Cost: 12 * x",
        "Paper = 2 square feet",
        "Cost: 12 * x = 24 pens",
        "Cost: 2 * 3 = 6 pens and 4 * 5 books",
        "",
        ":",
    ],
)
def test_what_says_more_than_a_calculation_is_none(line: str) -> None:
    assert calculation(line) is None


def test_results_are_put_in() -> None:
    results = {1: "6", 2: "-2.5", 3: "found", 12: "7"}
    assert fill_results("All: result 1 + result 12", results) == "6 + 7"
    assert fill_results("All: 3 * result 2", results) == "3 * (-2.5)"
    assert fill_results("All: 3 * result 3", results) is None, "no number"
    assert fill_results("All: 3 * result 4", results) is None, "not there"
    assert fill_results("All: the sum", results) is None


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        (["Pens: 3 * 4", "All: result 1 + 5"], "result 1 + 5"),
        (["Cost of pens: 3 * 4", "Books: 2 * 5", "All: cost of pens + the Books"], "result 1 + result 2"),
        (["Cost: 3 * 4", "Cost of books: 2 * 5", "Left: 100 - cost of books"], "100 - result 2"),
        (["Cost = 3 * 4", "Half = cost / 2 = 6"], "result 1 / 2"),
        (["Cost: 3 * 4", "Costs: cost * 2", "Left: 100 - costs"], "100 - result 2"),
        (["Cost: 3 * 4", "Cost: 2 * 5", "Left: 100 - cost"], None),  # which of the two?
        (["All: total / 2", "Total: 3 * 4"], "3 * 4"),
        (["Pens: 3 * 4", "All: result 2 + 5"], None),  # of itself
        (["Pens: 3 * 4", "All: pens and 5"], None),
        (["Result: 3 * 4", "All: result 1 + 5"], "result 1 + 5"),
        (["Pens: 3 * 4", "pens + 5"], "result 1 + 5"),
        (["Price: look it up", "Twice that: price * 2"], "result 1 * 2"),
        (["12 * 3"], "12 * 3"),
    ],
)
def test_lines_may_name_others_by_what_they_are_about(lines: list[str], last: str | None) -> None:
    reader = PlanReader()
    read = [reader.calculation(f"{number}. {line}") for number, line in enumerate(lines, 1)]
    assert read[-1] == (None if last is None else (len(lines), last))


@given(
    st.lists(st.sampled_from(["pens", "cost", "cost of pens", "result 1", "3", "+", "*", ":", "=", "the"]), max_size=8)
)
def test_a_line_that_is_read_names_only_lines_before_it(words: list[str]) -> None:
    reader = PlanReader()
    for number, line in enumerate(["pens: 1", "cost: 2", " ".join(words), "cost of pens: 3"], 1):
        read = reader.calculation(f"{number}. {line}")
        if read is not None:
            results = {earlier: str(earlier) for earlier in range(1, number)}
            assert fill_results(read[1], results) is not None


@given(st.integers(-999, 999), st.integers(1, 999), st.sampled_from(["+", "-", "*", "/", "x", "×", "÷"]))
def test_what_is_put_in_is_calculated_as_one_number(first: int, second: int, sign: str) -> None:
    expression = fill_results(f"All: result 1 {sign} result 2", {1: str(first), 2: str(second)})
    assert expression is not None
    exact = {"+": Fraction(first + second), "-": Fraction(first - second), "/": Fraction(first, second)}
    value = exact.get(sign.replace("÷", "/"), Fraction(first * second))
    assert float(calculate(expression)) == pytest.approx(float(value))


@tool("calculator")
def two_numbers(first: float, second: float) -> float:
    """Add two numbers."""
    return first + second


def test_which_tool_is_a_calculator() -> None:
    assert find_calculator([two_numbers, calculator]) is calculator
    assert find_calculator([two_numbers]) is None


def test_the_examples_of_a_thinker_are_calculations_that_come_out() -> None:
    shown = calculation_prompt("How much?", [])
    assert shown[-1].text == "How much?"
    for thought, result in pairwise(shown[2:-1]):
        expression = fill_results(thought.text, {}) if isinstance(thought, AIMessage) else None
        if expression is not None:
            assert calculate(expression) == result.text, thought.text
    assert [message.text for message in shown].count(DONE) == 3


def test_a_thinker_sees_its_thoughts_and_what_they_came_to() -> None:
    call = AIMessage("", tool_calls=[{"name": "calculator", "args": {}, "id": "1"}])
    so_far = [AIMessage("Thought: Pens: 2 * 3"), call, ToolMessage("6", tool_call_id="1"), AIMessage("Thought: Hm")]
    assert [(message.type, message.text) for message in calculation_prompt("How much?", so_far)[-4:]] == [
        ("human", "How much?"), ("ai", "Pens: 2 * 3"), ("human", "6"), ("ai", "Hm"),
    ]  # fmt: skip


def test_the_examples_of_a_planner_are_plans_of_calculations_that_come_out() -> None:
    comes_to = []
    for message in plan_examples()[2::2]:
        results: dict[int, str] = {}
        for line in message.text.splitlines():
            number, _, step = line.partition(". ")
            expression = fill_results(step, results)
            assert expression is not None, step
            results[int(number)] = calculate(expression)
        comes_to.append(results[max(results)])
    assert comes_to == ["22", "72", "15"]
