"""Plans whose lines are tool calls: `2. calculator("$1 + 60")`, where $1 is the result of call 1."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from typing_extensions import TypedDict

_LINE = re.compile(r"\W{0,4}(\d{1,4})\W{1,4}([A-Za-z_]\w*)\((.*)\)\s*(?:#[^)]*)?\W*$")
# Not the beginning of an amount of money with cents.
_REFERENCE = re.compile(r"\$\{?(\d{1,4})\b\}?(?![.,]\d)")


class PlannedCall(TypedDict):
    """A tool call whose arguments may name the results of earlier ones.

    Attributes:
        plan: The plan's number: 1, and more where it was planned anew.
        number: Its number in that plan.
        tool: The tool's name.
        arguments: By name; texts may have $1, $2, … in them.
    """

    plan: int
    number: int
    tool: str
    arguments: dict[str, Any]


def read_call(line: str, tools: Mapping[str, BaseTool], plan: int = 1) -> PlannedCall | None:
    """The call in a line of a plan; None for a line that is something else, such as a thought.

    Arguments are Python literals, by name or in the tool's order. Anything else, as in `calculator(2 * 3)`, is a text.

    Args:
        line: One line.
        tools: Tools by name, for the names of arguments; a call may name another.
        plan: The plan's number.
    """
    found = _LINE.match(line.replace("`", ""))
    if found is None:
        return None
    number, tool, inside = int(found[1]), found[2], found[3].strip()
    names = list(tools[tool].args) if tool in tools else []
    return PlannedCall(plan=plan, number=number, tool=tool, arguments=_arguments(inside, names))


def _arguments(inside: str, names: Sequence[str]) -> dict[str, Any]:
    code = f"f({_quoted(inside)})"
    try:
        call = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {_name(names, 0): inside.strip("\"'")}
    if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
        return {_name(names, 0): inside}
    given = {_name(names, place): _value(code, node) for place, node in enumerate(call.args)}
    return given | {str(keyword.arg): _value(code, keyword.value) for keyword in call.keywords}


def _quoted(inside: str) -> str:
    """With references outside of texts made texts: $1 is no Python."""
    parts = re.split(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", inside)
    lone = re.compile(rf"(?<![\w.*/+-])\s*{_REFERENCE.pattern}\s*(?=,|$)")
    return "".join(
        part if place % 2 else lone.sub(lambda match: json.dumps(match[0].strip()), part)
        for place, part in enumerate(parts)
    )


def _name(names: Sequence[str], place: int) -> str:
    return names[place] if place < len(names) else f"argument {place + 1}"


def _value(code: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ast.get_source_segment(code, node)


def references(call: PlannedCall) -> set[int]:
    """The numbers of the calls whose results a call needs: earlier ones; a higher number is taken for dollars."""
    named = {int(number) for text in _texts(call["arguments"]) for number in _REFERENCE.findall(text)}
    return {number for number in named if 0 < number < call["number"]}


def fill_references(call: PlannedCall, results: Mapping[int, str]) -> PlannedCall:
    """The call with results in the place of their numbers: those of the calls that it `references`, and no others."""

    def fill(text: str) -> str:
        return _REFERENCE.sub(lambda match: results.get(int(match[1]), match[0]), text)

    return {**call, "arguments": in_texts(call["arguments"], fill)}


def in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with each text in it changed, however deep in lists and dictionaries."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [in_texts(entry, change) for entry in value]
    if isinstance(value, dict):
        return {key: in_texts(entry, change) for key, entry in value.items()}
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for entry in value for text in _texts(entry)] if isinstance(value, (list, tuple)) else []
