"""Plans as texts: their lines, the calls in the lines, and results in place of references."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.tools import StructuredTool, tool

from lookahead_agent.agents.plans import (
    MAX_VALUE_LENGTH,
    format_plans,
    is_value,
    parse_plan,
    plan_form,
    shorten,
)
from lookahead_agent.agents.written_calls import Parameters
from lookahead_agent.system.texts import truncation_notice


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
        ('`calculator("$1 * 1.19")`', {"expression": "$1 * 1.19"}),
        ("calculator(expression=480 * $1)", None),
        ("calculator($1)", {"expression": "$1"}),
        ("sql(What's the total)", None),
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


@pytest.mark.parametrize(
    "line",
    [
        'calculator(expression="... $1 ...")',
        'calculator(expression="<expression with $1>")',
        'calculator("<expression with $1>")',
        "calculator(expression=<expression with $1>)",
        'calculator(expression="…")',
        "calculator()",
        "calculator(expression=2 * $1)",
        'calculator(expression: "$1 * 2")',
        "sql()\n```\n<statement>\n```",
        'other("$1")',
        "multiply the price",
    ],
)
@pytest.mark.parametrize("more", ["", '\n3. calculator("$1 + 1")', '\n3. calculator("$2 + 1")'])
def test_line_with_a_gap_is_incomplete_and_no_line_is_dropped(line: str, more: str) -> None:
    first, second, *others = parse_plan(f'Plan:\n1. sql("SELECT 1")\n2. {line}{more}', TOOLS)
    assert first.arguments == {"statement": "SELECT 1"}
    assert (second.text, second.arguments) == (line, None)
    assert len(others) == bool(more)


@pytest.mark.parametrize("end", ["\n\n$1 = 2", "\n\nThe result is $9.", "\nIt is 9.", "  # 9\n\nIt is."])
@pytest.mark.parametrize("call", ['calculator("$1 * 7")', "calculator(expression=$1 * 7)", 'calculator("<$1 * 7>")'])
def test_what_a_model_writes_after_its_plan_is_no_part_of_the_last_line(call: str, end: str) -> None:
    _, last = parse_plan(f'Plan:\n1. sql("SELECT 1")\n2. {call}{end}', TOOLS)
    assert last.text == call


def test_plan_form_has_one_call_and_one_with_code() -> None:
    block = "\n```\n<code>\n```"
    assert plan_form([calculator]) == plan_form([calculator, read_file]) == '1. calculator(expression="<expression>")'
    assert plan_form([sql]) == plan_form([sql, calculator]) == "1. sql()\n```\n<statement>\n```"
    assert plan_form([read_file, calculator, python]) == f'1. read_file(name="<name>")\n2. python(){block}'
    assert plan_form([python, read_file]) == f"1. python(){block}"
    for tools in ([SEARCH], [read_file, SEARCH], [*TOOLS.values()]):
        form = plan_form(tools)
        assert "..." not in form
        assert "…" not in form
        copied = parse_plan(f"Plan:\n{form}", {tool.name: tool for tool in tools})
        assert [line.arguments for line in copied] == [None] * len(copied), "a copy of the form is incomplete"


OPEN = "```python\n"


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("1. python()\n```\nx = '\\n'\n\n2. no\n```\n2. sql('')", [{"code": "x = '\\n'\n\n2. no"}, {"statement": ""}]),
        ("1. python()\n\n  ```py\n  if x:\n    y\n  ```\n2. sql('a')", [{"code": "if x:\n  y"}, {"statement": "a"}]),
        ("1. **`python()`**:\n~~~\n```\n~~~~\n~~~\nThat is all.", [{"code": "```\n~~~~"}]),
        ("1. save('a.md')\n````md\n```\nx\n```\n````", [{"name": "a.md", "text": "```\nx\n```"}]),
        ("1. save(text='t')\n```\na.md\n```", [{"text": "t", "name": "a.md"}]),
        ("```\n1. python()\n```sql\nx\n```\n2. sql('a')\n```", [{"code": "x"}, {"statement": "a"}]),
        # The plan's own fence, no block.
        ("```\n1. python()\n```\nand more\n```", [None]),
        ("```\n1. sql('a')\n2. sql('b')\n```\nThat is all.", [{"statement": "a"}, {"statement": "b"}]),
        # Nothing is missing, or more than a text.
        ("1. sql('a')\n```\nb\n```", [{"statement": "a"}]),
        ("1. save()\n```\na\n```", [None]),
        ("1. count()\n```\n3\n```", [None]),
        ("1. python(limit=3)\n```\nx\n```", [None]),
        # Lines that cannot be read exactly are incomplete.
        (f"1. python()\n{OPEN}2. sql('no')\n", [None]),
        (f"1. python()\n{OPEN}x\n```\n```\ny\n```", [None]),
        (f"1. python()\nHere it is:\n{OPEN}x\n```", [None]),
        (f"1. python(code=<code>)\n{OPEN}x\n```", [None]),
        (f"1. python()\n{OPEN}<code>\n```", [None]),
        (f"1. python\n{OPEN}x\n```", [None]),
    ],
)  # fmt: skip
def test_block_under_a_call_is_the_text_that_it_lacks(plan: str, expected: list[dict[str, Any] | None]) -> None:
    @tool
    def save(name: str, text: str, mode: str = "w") -> str:
        """Save a text."""
        return ""

    @tool
    def count(most: int) -> str:
        """Count."""
        return ""

    lines = parse_plan(f"I do it.\n\nPlan:\n{plan}", TOOLS | {"save": save, "count": count})
    assert [line.arguments for line in lines] == expected


def test_line_that_references_itself_or_a_later_line_is_incomplete() -> None:
    first, second, third = parse_plan('Plan:\n1. sql("SELECT $1")\n2. calculator("$1 * $3")\n3. sql("$9 $1")', TOOLS)
    assert (first.arguments, second.arguments) == (None, None)
    assert second.text == 'calculator("$1 * <unknown>")'
    assert parse_plan("Plan:\n1. calculator($2)", TOOLS)[0].arguments is None, "outside of quotes, $2 is a reference"
    assert second.without_references({1: "a | b\n1 | 2"}) == 'calculator("<result 1> * <unknown>")'
    assert second.without_references({1: "4.5\n"}) == 'calculator("4.5 * <unknown>")', "a model would copy a name"
    assert second.references == {1}
    assert third.arguments == {"statement": "$9 $1"}, "no line has this number: it is an amount of money"


B = {"statement": "b"}
A, ADD = {"statement": "a"}, {"expression": "$1 + 1"}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        # A second call with the first one's number, also in the fence after a call that lacks nothing.
        ("1. sql('a')\n1. sql('b')", [A, B]),
        ("1. sql('a')\n```\n1. sql('b')\n```", [A, B]),
        ("1. sql('a')\n```sql\n2. sql('b')\n3. python()\n```\nx\n```\n", [A, B, None]),
        ("```\n1. sql('a')\n```\n```\n1. python()\n```\nx\n```", [A, None]),
        ("1. sql('a')\n\nPlan:\n1. sql('b')", [A, B]),
        ("3. sql('a')\n7. sql('b')", [A, B]),
        # A repetition is no further line.
        ("1. sql('a')\n2. calculator('$1 + 1')\n1. sql(\"a\")\n2. calculator('$1 + 1')\n3. sql('b')", [A, ADD, B]),
        ("1. sql('a')\n2. sql('a')", [A, A]),
        # $1 is the result of one of two lines, or of none.
        ("1. sql('a')\n1. calculator('$1 + 1')", [A, None]),
        ("1. sql('a')\n2. calculator('$1 + 1')\n1. sql('b')\n2. calculator('$1 + 1')", [A, ADD, B, None]),
        ("1. sql('a')\n3. sql('b')\n4. calculator('$3 + 1')", [A, B, None]),
        ("1. sql('a')\n1. sql('b')\n1. calculator('$5 + $7.50')", [A, B, {"expression": "$5 + $7.50"}]),
        # A numbered text that calls nothing is a line only if it has the next number.
        ("1. sql('a')\n2. add it\n1. sql('b')\n3. add it\n\nSteps:\n1. add it", [A, None, B, None]),
        ("1. sql('a')\n```\n2. add it\n```\n2. sql('b')", [A, B]),
        # The block of a call that lacks its argument, or that cannot be read, is part of that call.
        ("1. python()\n```\n# 1. sql('b')\n```", [{"code": "# 1. sql('b')"}]),
        ("1. python(code=<code>)\n```\n# 1. sql('b')\n```", [None]),
    ],
)
def test_every_numbered_call_is_a_line(plan: str, expected: list[dict[str, Any] | None]) -> None:
    lines = parse_plan(f"Plan:\n{plan}", TOOLS)
    assert [line.arguments for line in lines] == expected
    assert [line.number for line in lines] == [*range(1, len(expected) + 1)]
    assert all("$" not in line.text for line in lines if line.arguments is None), "a model would copy it"


def test_plan_is_numbered_from_one_or_after_earlier_results() -> None:
    for first, known, expected in ((3, 2, [3, 4]), (1, 2, [1, 2]), (3, 0, [1, 2]), (2, 2, [1, 2])):
        text = f'Plan:\n{first}. sql("$2")\n{first + 1}. sql("b")'
        lines = parse_plan(text, TOOLS, known)
        assert [line.number for line in lines] == expected
        assert [line.arguments for line in lines] == [{"statement": "$2"} if first == 3 and known else None, B]
    assert parse_plan('Plan:\n3. sql("$2")', TOOLS, 2)[0].references == {2}
    assert parse_plan('Plan:\n1. sql("$1")', TOOLS, 2)[0].arguments is None, "1 is its own number"


def fill(line: str, **results: str) -> dict[str, Any] | None:
    *_, last = parse_plan(f'Plan:\n1. sql("a")\n2. sql("b")\n3. {line}', TOOLS)
    return last.fill({int(name[1:]): text for name, text in results.items()})


def test_result_of_one_value_replaces_a_reference_inside_a_text() -> None:
    assert fill('calculator("$1 * ${2}")', r1="347", r2=" 2\n") == {"expression": "347 * 2"}
    assert fill('calculator("$1 and $5.50")', r1="347") == {"expression": "347 and $5.50"}, "money is no reference"
    assert fill('calculator("max($1,2) + $1,200 + $1,50")', r1="3") == {"expression": "max(3,2) + $1,200 + $1,50"}


def test_result_of_several_lines_replaces_only_a_whole_argument() -> None:
    rows = "a | b\n1 | 2"
    assert fill('python("$1")', r1=rows) == {"code": rows}
    assert fill('python("print($1)")', r1=rows) is None
    assert not is_value("x" * (MAX_VALUE_LENGTH + 1))


SEARCH = StructuredTool(
    name="resolve-library.id",
    description="Search.",
    func=lambda **given: "",
    args_schema={
        "type": "object",
        "required": ["q"],
        "properties": {
            "q": {"type": "string"},
            "exact": {"type": "boolean"},
            "limit": {"type": ["integer", "null"]},
            "from": {"type": "string"},
            "class": {"type": "string"},
            "cik-A": {"type": "string"},
            "$top": {"type": "number"},
            "filter": {"type": "object", "properties": {"open": {"type": "boolean"}}},
            "tags": {"type": "array", "items": {"type": "string"}},
            "sort": {"enum": ["up", "down"]},
        },
    },
)


def searched(arguments: str) -> dict[str, Any] | None:
    first, line = parse_plan(
        f'Plan:\n1. sql("SELECT 1")\n2. resolve-library.id({arguments}', TOOLS | {SEARCH.name: SEARCH}
    )
    assert first.arguments == {"statement": "SELECT 1"}
    assert line.tool == SEARCH.name
    return line.arguments


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('q="tea", exact=false, limit=null)', {"exact": False, "limit": None}),
        ('q="tea", exact=True, limit=None)', {"exact": True, "limit": None}),
        ('"tea", true, 3)', {"exact": True, "limit": 3}),
        ('{"q": "tea", "limit": 3, "from": "2024-01-01"})', {"limit": 3, "from": "2024-01-01"}),
        ('q="tea", from="2024-01-01", class=\'x\', cik-A = "a")', {"from": "2024-01-01", "class": "x", "cik-A": "a"}),
        ('q="tea", $top=1.5e1)', {"$top": 15.0}),
        ('q="tea", filter={"open": true, "until": null, "in": [1, {"a": -2}]})', {
            "filter": {"open": True, "until": None, "in": [1, {"a": -2}]}
        }),
        ('q="tea", tags=["a", "b",],)', {"tags": ["a", "b"]}),
        ('q="tea", tags=("a", "b"))', {"tags": ["a", "b"]}),
        ('q="tea", # the drink\n  limit=1_000)', {"limit": 1000}),
        ('q="tea", limit=$1)', {"limit": "$1"}),
        ('q="tea", tags=["$1", $1])', {"tags": ["$1", "$1"]}),
        ('q=("tea")).', {}),
        ('q="tea")\nThat is all.', {}),
        ('q="tea") # and more(', {}),
        # Not exactly literals.
        ('q="tea", limit="3")', None),
        ("q=tea)", None),
        ("q=3)", None),
        ('q="tea", exact=1)', None),
        ('q="tea", sort="left")', None),
        ('q="tea", tags="a")', None),
        ('q="tea", filter={"open": "yes"})', None),
        ('q="tea", limit=3.5)', None),
        ('q="tea", limit=NaN)', None),
        ('q="tea", $top=Infinity)', None),
        ('q="tea", $top=1e999)', None),
        (f'q="tea", limit={"9" * 5_000})', None),
        ('q="tea", limit=007)', None),
        ('q="tea", limit=1+2)', None),
        ('q="tea", limit=2024-01-01)', None),
        ('q="tea", limit=$2)', None),
        ('q="tea", limit=$1 + 1)', None),
        ('q="tea", other=1)', None),
        ('q="tea", q="milk")', None),
        ('"tea", q="milk")', None),
        ('q="tea", 3)', None),
        ('{"q": "tea", "q": "milk"})', None),
        ('{"q": "tea"}, limit=3)', None),
        ('{"limit": 3})', None),
        ('q="tea", filter={"a": 1, "a": 2})', None),
        ('q="tea", filter={1: 2})', None),
        ('q="tea", filter={"$1": 2})', None),
        ('q="tea", tags={"a", "b"})', None),
        ('q="tea" "milk")', None),
        ('q="tea"$1)', None),
        ('q="tea" + "milk")', None),
        ('q=f"tea")', None),
        ('q=b"tea")', None),
        ("q=“tea”)", None),
        ('q="tea)', None),
        ('q="tea\\")', None),
        ("q='it's')", None),
        ('q="tea"', None),
        ('q="tea"])', None),
        ('q="tea",, limit=3)', None),
        ('q=, limit=3)', None),
        ('q="tea", limit)', None),
        ('q: "tea")', None),
        ('q="tea", tags=[...])', None),
        ('q="tea", tags=["..."])', None),
        ('q="a\\/b")', None),
        (f'q="tea", tags={"[" * 10_000}{"]" * 10_000})', None),
        ('q="tea", limit=18446744073709551615)', {"limit": 2**64 - 1}),
        ('q="tea", limit=18446744073709551616)', None),  # no checkpoint can hold it
        ('q="tea", limit=-0xFFFFFFFFFFFFFFFF)', None),
        # More than the call.
        ('q="tea").strip()', None),
        ('q="tea")\n.strip()', None),
        ('q="tea") + "milk"', None),
        ('q="tea") if exact else None', None),
        ('q="tea")[0]', None),
        ('q="tea"), calculator("1")', None),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_line_has_exactly_the_values_that_it_states_or_is_incomplete(
    arguments: str, expected: dict[str, Any] | None
) -> None:
    assert searched(arguments) == (None if expected is None else {"q": "tea"} | expected)


@pytest.mark.parametrize(
    ("quoted", "value"),
    [
        ('"a \\"b\\" \\\\ c"', 'a "b" \\ c'),
        ('"it\'s (x, y]"', "it's (x, y]"),
        ('"\\u00e9 \\ud83d\\ude00"', "é 😀"),
        (r'"\d+\s\w"', r"\d+\s\w"),
        (r'r"\d\n"', r"\d\n"),
        ('"""a "b"\n2. c"""', 'a "b"\n2. c'),
        ('"a\r\nb"', "a\r\nb"),
        ('""', ""),
        ('"# no comment"', "# no comment"),
        ('"true"', "true"),
        ("'{\"id\": $1}'", '{"id": $1}'),
    ],
)
def test_text_in_quotes_is_read_exactly(quoted: str, value: str) -> None:
    assert searched(f"q={quoted})") == {"q": value}


def test_lone_object_is_all_arguments_or_the_first_one_by_the_schema() -> None:
    objects = {"type": "object", "properties": {"where": {"type": "object"}, "most": {"type": "integer"}}}
    tool = StructuredTool(name="find", description="", func=lambda **given: "", args_schema=objects)

    def read(text: str) -> dict[str, Any] | None:
        return parse_plan(f"Plan:\n1. find({text})", {"find": tool})[0].arguments

    assert read('{"name": "tea"}') == {"where": {"name": "tea"}}
    assert read('{"where": {"name": "tea"}, "most": 3}') is None, "it could be both"
    assert read('{"most": "three"}') == {"where": {"most": "three"}}
    assert read('where={"most": 3}, most=2') == {"where": {"most": 3}, "most": 2}


def test_tools_are_found_by_their_whole_name() -> None:
    tools = dict.fromkeys(("get", "get-docs", "_get", "2fa.code"), sql)
    names = ["get", "get-docs", "_get", "2fa.code", "**get-docs**", "docs.get", "get-doc", "other"]
    found = [parse_plan(f'Plan:\n1. {name}("x")', tools)[0].tool for name in names]
    assert found == ["get", "get-docs", "_get", "2fa.code", "get-docs", None, None, None]


def test_numbers_begin_lines_except_in_triple_quotes() -> None:
    plan = 'Plan:\n1. python(code="""\n2. sql("no")\n""")\n2. sql("yes")\n3. sql("cut\n4. sql("no)\n4. sql("four")'
    lines = parse_plan(plan, TOOLS)
    assert [line.arguments for line in lines[:2]] == [{"code": '\n2. sql("no")\n'}, {"statement": "yes"}]
    assert lines[2].arguments is None
    open_call = parse_plan('Plan:\n1. python(code="""\n2. sql("no")\n', TOOLS)
    assert [(line.tool, line.arguments) for line in open_call] == [("python", None)]


def test_64_kilobytes_of_a_plan_are_read_in_linear_time() -> None:
    for text in (
        "'\\'" * 16_000,
        '"' * 64_000,
        "(" * 64_000,
        'python("""' + "\n2. x" * 13_000,
        "$1" * 32_000,
        ")\n```\n2. sql(" * 6_000,
        ")\n```a\n2. sql(" * 6_000 + ")\n~~~",
        ")\n1. sql(" * 6_000,
        "".join(f"{number})\n1. sql(" for number in range(1_000)),
        "".join(f"\n1. sql({number}" for number in range(1_500)),
    ):
        started = time.process_time()
        parse_plan(f"Plan:\n1. sql({text}", TOOLS)
        parse_plan(f"Plan:\n1. {text}", TOOLS)
        assert time.process_time() - started < 2, text[:20]


def test_schemas_that_are_hard_to_check_or_invalid_make_a_line_incomplete() -> None:
    nested: dict[str, Any] = {"a0": {"type": "string"}}
    nested |= {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n - 1}"}] * 2} for n in range(1, 30)}
    schemas = [
        {"properties": {"q": {"$ref": "#/$defs/a29"}}, "$defs": nested},
        {"properties": {"q": {"$ref": "http://127.0.0.1:1/x.json"}}},
        {"properties": {"q": {"type": "nothing"}}},
    ]
    for schema in schemas:
        assert not Parameters(schema).fits({"q": "a"})
    slow = Parameters({"properties": {"q": {"type": "string", "pattern": "(a+)+$"}}})
    assert slow.fits({"q": "a" * 40 + "!"}), "patterns are the tool's own matter"
    lax: list[dict[str, Any]] = [
        {"properties": {"q": True}},
        {"additionalProperties": {"type": "string"}},
        {"required": ["q"], "properties": {"q": {}}},
    ]
    assert all(Parameters(schema).fits({"q": "a"}) for schema in lax)


def test_results_take_the_type_of_their_argument() -> None:
    tools = TOOLS | {SEARCH.name: SEARCH}

    def fill(arguments: str, result: str) -> dict[str, Any] | None:
        *_, line = parse_plan(f'Plan:\n1. sql("a")\n2. {SEARCH.name}({arguments})', tools)
        return line.fill({1: result})

    assert fill('q="$1", limit=$1', "42") == {"q": "42", "limit": 42}
    assert fill('q="a", tags=$1', '["b"]') == {"q": "a", "tags": ["b"]}
    assert fill('q="a", tags=["$1"]', "42") == {"q": "a", "tags": ["42"]}
    assert fill('q="a", limit="$1"', "none found") is None
    assert fill('q="a", limit=$1', str(2**64 - 1)) == {"q": "a", "limit": 2**64 - 1}
    for invalid in ("NaN", "1e400", str(2**64), "9" * 5_000, "[" * 200 + "]" * 200):
        assert fill('q="a", $top=$1', invalid) is None
        assert fill('q="a", limit=$1', invalid) is None
    assert fill("q='{\"id\": $1}'", "42") == {"q": '{"id": 42}'}
    assert fill('q="$1"', "x" * 9 + truncation_notice(9, 99, "ask for less")) is None, "the notice is no part of it"


@given(st.text(), st.integers(-(2**63), 2**64 - 1))
def test_python_literals_are_parsed_to_their_values(text: str, number: int) -> None:
    parsed = parsed_arguments(f"read_file(name={text!r}, first_line={number!r})")
    incomplete = not text.strip() or set(text.split()) <= {"...", "…"} or "<" in text or "$" in text or "…" in text
    if not incomplete and "..." not in text:
        assert parsed == {"name": text, "first_line": number}


@given(st.text(max_size=200))
def test_parse_plan_accepts_any_text(text: str) -> None:
    for line in parse_plan(f"Plan:\n1. sql({text}", TOOLS):
        line.fill({1: "x", 2: "y\nz"})
        json.dumps(line.arguments, default=str)


def test_a_shortened_text_says_how_much_is_left_out() -> None:
    text = "\n".join(f"{number:03}" for number in range(300))
    assert shorten(text, len(text)) == text
    shown = re.fullmatch(
        r"(.*\n)\[([\d,]+) of 1,199 characters are left out here\]\n(.*)", shorten(text, 120), re.DOTALL
    )
    assert shown is not None
    head, left_out, tail = shown.groups()
    assert text.startswith(head), "whole lines"
    assert text.endswith(f"\n{tail}")
    assert int(left_out.replace(",", "")) == len(text) - len(head) - len(tail)


def test_a_shortened_text_keeps_parts_of_long_lines() -> None:
    shown = shorten("first\n" + "x" * 5_000 + "\nlast", 1_000)
    assert shown.startswith("first\n" + "x" * 660 + "\n[")
    assert shown.endswith("here]\n" + "x" * 328 + "\nlast")


def test_no_plan_has_tried_anything() -> None:
    assert format_plans([]) == "none"
