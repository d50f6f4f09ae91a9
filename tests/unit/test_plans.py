"""Plans as texts: their lines, the calls in the lines, and results in place of references."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.tools import tool

from lookahead_agent.agents.plans import MAX_VALUE_LENGTH, is_value, parse_plan, plan_form


@tool
def sql(statement: str) -> str:
    """Ask the database."""
    return ""


@tool
def calculator(expression: str) -> str:
    """Work out an expression."""
    return ""


@tool
def python(code: str) -> str:
    """Run code."""
    return ""


@tool
def read_file(name: str, first_line: int = 1) -> str:
    """Read a file."""
    return ""


TOOLS = {entry.name: entry for entry in (sql, calculator, python, read_file)}


def parsed_arguments(line: str) -> dict[str, Any] | None:
    _, second = parse_plan(f'Plan:\n1. sql("SELECT 1")\n2. {line}', TOOLS)
    return second.arguments


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sql(statement=\"SELECT a FROM t WHERE b = 'x(y'\")", {"statement": "SELECT a FROM t WHERE b = 'x(y'"}),
        ("sql('SELECT 1')  # one", {"statement": "SELECT 1"}),
        ("`calculator($1 * 1.19)`", {"expression": "$1 * 1.19"}),
        ("calculator(expression=480 * $1)", {"expression": "480 * $1"}),
        ("calculator($1)", {"expression": "$1"}),
        ("sql(What's the total)", {"statement": "What's the total"}),
        ('rows = sql("SELECT 2")', {"statement": "SELECT 2"}),
        ('read_file("a.txt", first_line=3)', {"name": "a.txt", "first_line": 3}),
        ('python(code="""\nimport json\n3. x\nprint(1)\n""")', {"code": "\nimport json\n3. x\nprint(1)\n"}),
        ("python(code=\"import json\nprint('a')\")", {"code": "import json\nprint('a')"}),
        ("sql()", None),
        ('read_file("a.txt", first_line=...)', None),
        ('sql(query="SELECT 1")', None),
        ('sql("a", "b")', None),
    ],
)
def test_arguments_of_a_call_are_parsed(line: str, expected: dict[str, Any] | None) -> None:
    assert parsed_arguments(line) == expected


def test_lines_without_a_call_of_a_known_tool_are_kept() -> None:
    text = 'I think.\n\nPlan:\n1. look at the table\n2. other("x")\n3. sql("SELECT $1")\nThat is all.'
    first, second, third = parse_plan(text, TOOLS)
    assert (first.tool, second.tool, third.tool) == (None, None, "sql")
    assert third.references == {1}


def test_numbered_lines_without_the_marker_are_no_plan() -> None:
    assert parse_plan('1. sql("SELECT 1")', TOOLS) == []


def test_copied_lines_of_the_form_are_dropped_unless_another_line_references_them() -> None:
    lines = parse_plan('Plan:\n1. sql("SELECT 1")\n2. calculator(expression="... $1 ...")', TOOLS)
    assert [line.number for line in lines] == [1]
    lines = parse_plan('Plan:\n1. sql("...")\n2. calculator("$1 + 1")', TOOLS)
    assert [line.number for line in lines] == [1, 2]
    assert len(parse_plan('Plan:\n1. sql("...")', TOOLS)) == 1, "the only line is kept"


def test_plan_form_has_two_calls_with_placeholder_arguments() -> None:
    lines = parse_plan(f"Plan:\n{plan_form(list(TOOLS.values()))}", TOOLS)
    assert [line.tool for line in lines] == ["sql", "read_file"]
    assert all(line.empty for line in lines)
    assert plan_form([sql]) == '1. sql(statement="...")'


def test_line_that_references_itself_or_a_later_line_is_incomplete() -> None:
    first, second, third = parse_plan('Plan:\n1. sql("SELECT $1")\n2. calculator("$1 * $3")\n3. sql("$9 $1")', TOOLS)
    assert (first.arguments, second.arguments) == (None, None)
    assert second.text == 'calculator("$1 * ...")'
    assert second.references == {1}
    assert third.arguments == {"statement": "$9 $1"}, "no line has this number: it is an amount of money"


def fill(line: str, **results: str) -> dict[str, Any] | None:
    *_, last = parse_plan(f'Plan:\n1. sql("a")\n2. sql("b")\n3. {line}', TOOLS)
    return last.filled({int(name[1:]): text for name, text in results.items()})


def test_result_of_one_value_replaces_a_reference_inside_a_text() -> None:
    assert fill('calculator("$1 * ${2}")', r1="347", r2=" 2\n") == {"expression": "347 * 2"}
    assert fill('calculator("$1 and $5.50")', r1="347") == {"expression": "347 and $5.50"}, "money is no reference"


def test_result_of_several_lines_replaces_only_a_whole_argument() -> None:
    rows = "a | b\n1 | 2"
    assert fill('python("$1")', r1=rows) == {"code": rows}
    assert fill('python("print($1)")', r1=rows) is None
    assert not is_value("x" * (MAX_VALUE_LENGTH + 1))


@given(st.text(), st.integers())
def test_python_literals_are_parsed_to_their_values(text: str, number: int) -> None:
    parsed = parsed_arguments(f"read_file(name={text!r}, first_line={number!r})")
    incomplete = not text.strip() or set(text.split()) <= {"...", "…"} or "<" in text or "$" in text or "…" in text
    if not incomplete and "..." not in text:
        assert parsed == {"name": text, "first_line": number}


@given(st.text(max_size=200))
def test_parse_plan_accepts_any_text(text: str) -> None:
    for line in parse_plan(f"Plan:\n1. sql({text}", TOOLS):
        line.filled({1: "x", 2: "y\nz"})
        json.dumps(line.arguments, default=str)
