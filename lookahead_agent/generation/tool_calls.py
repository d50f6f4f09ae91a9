"""Tool calls: what a reply's JSON must say to be one, and what becomes of those that cannot be read."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall, ToolMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call

Tools = Sequence[Mapping[str, Any]]  # tools in OpenAI's format

_ARGUMENTS = ("arguments", "parameters", "args")  # Keys under which models write a call's arguments
_DEEPEST = 100  # levels of objects and lists in a call
_MEANINGLESS = frozenset({"id", "type"})
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
UNREADABLE = "(unreadable) "  # Precedes the text of a call that could not be read: see `as_invalid_json`


@dataclass
class ParsedReply:
    """A reply's text, its tool calls, and calls that could not be read, with the reason."""

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    invalid_tool_calls: list[InvalidToolCall] = field(default_factory=list)

    def add(self, name: Any, arguments: Any, source: str, tools: Tools) -> None:
        """Add a call that was read from `source`, or say why it is none."""
        # The tool may be unknown: LangGraph's `ToolNode` tells the model which tools there are.
        try:
            if not isinstance(name, str) or not name or _SURROGATE.search(name):
                raise ValueError("it names no tool")
            if isinstance(arguments, str):
                arguments = read_json(arguments)
            if arguments is None and takes_nothing(name, tools):
                arguments = {}
            if not isinstance(arguments, dict):
                raise ValueError("its arguments are no JSON object")
            # Anything that came through another reader is read once more, strictly.
            arguments = read_json(json.dumps(arguments))
        except (ValueError, TypeError, RecursionError) as error:
            self.add_invalid(name if isinstance(name, str) else None, source, error)
        else:
            self.tool_calls.append(tool_call(name=name, args=arguments, id=f"call_{uuid.uuid4().hex[:24]}"))

    def add_source(self, source: str, tools: Tools) -> None:
        """Add a call by its JSON text: `{"name": …, "arguments": …}`, or say why it is none."""
        # "parameters" and "args" are read as "arguments" where there is only one of them. A missing key is not empty:
        # only a tool without parameters is called without arguments.
        name: Any = name_in(source)
        try:
            call = read_json(source)
            if not isinstance(call, dict):
                raise ValueError("it is no JSON object")
            name = call.get("name")
            keys = [key for key in _ARGUMENTS if key in call]
            if unknown := sorted(call.keys() - {"name", *_ARGUMENTS} - _MEANINGLESS):
                raise ValueError(f"a call has a name and arguments, not {', '.join(map(repr, unknown))}")
            if len(keys) > 1:
                raise ValueError(f"it has {' and '.join(map(repr, keys))}: which are its arguments?")
            if not keys and not takes_nothing(name, tools):
                raise ValueError('it has no "arguments"')
        except ValueError as error:
            self.add_invalid(name, source, error)
        else:
            self.add(name, call[keys[0]] if keys else None, source, tools)

    def add_invalid(self, name: Any, source: str, error: Exception | str, *, cut: bool = False) -> None:
        """Add a text that could not be read as a call; `cut`: the reply was cut off in it."""
        known = name if isinstance(name, str) and name and not _SURROGATE.search(name) else None
        reason = f"not a tool call: it was cut off ({error})" if cut else f"not a tool call: {error}"
        identity = f"call_{uuid.uuid4().hex[:24]}"
        self.invalid_tool_calls.append(invalid_tool_call(name=known, args=source, id=identity, error=reason))

    @property
    def called(self) -> bool:
        """Whether there is a call, also one that could not be read."""
        return bool(self.tool_calls or self.invalid_tool_calls)


def as_invalid_json(source: str) -> str:
    """The text of a call that could not be read, for LangChain and clients, which complete JSON that ends early."""
    # A tool would run with half a path, or with its defaults. Text that no JSON begins with stays unreadable to all.
    first = source.lstrip()[:1]
    return source if first and first not in '{["-0123456789tfnNI' else f"{UNREADABLE}{source}"


def calls_as_text(
    calls: Sequence[ToolCall], invalid: Sequence[InvalidToolCall]
) -> list[tuple[str | None, str | None, str]]:
    """Identity, name and arguments of calls, also of those that cannot be read, which nobody must complete."""
    read = [(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in calls]
    return read + [(call["id"], call["name"], as_invalid_json(call["args"] or "")) for call in invalid]


def takes_nothing(name: Any, tools: Tools) -> bool:
    """Whether a tool of this name has no parameters."""
    schemas = [tool["function"].get("parameters") or {} for tool in tools if tool["function"]["name"] == name]
    return (
        bool(schemas)
        and schemas[0].keys() <= {"type", "properties", "title", "description", "required"}
        and not (schemas[0].get("properties") or schemas[0].get("required"))
    )


def name_in(text: str) -> str | None:
    """The name in a call's JSON that cannot be read as a whole; None: there is none."""
    found = _NAME.search(text)
    return found[1] if found else None


# JSON


def read_json(text: str) -> Any:
    """A JSON value, read strictly; ValueError if it is none, or has a key twice, NaN, or half a surrogate pair."""
    # So it is with levels, floats and whole numbers beyond those that JSON readers and checkpoints can carry.
    try:
        value = json.loads(text, strict=False, object_pairs_hook=_distinct, **STRICT_NUMBERS)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if sum(1 for _ in levels(value)) > _DEEPEST:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
    if _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("it has half a surrogate pair, which is no character")
    return value


def loads(text: str) -> Any:
    """The value of a JSON text; raises ValueError if it is none, as NaN."""
    return json.loads(text, strict=False, parse_constant=_no_number)


def is_json(text: str) -> bool:
    """Whether a text is one whole JSON value."""
    try:
        loads(text)
    except ValueError:
        return False
    return True


def levels(value: Any) -> Iterator[list[Any]]:
    """The values in a value's objects and lists, level by level: first those of the outermost."""
    nested = [value] if isinstance(value, (dict, list)) else []
    while nested:
        yield (inner := [each for outer in nested for each in (outer.values() if isinstance(outer, dict) else outer)])
        nested = [each for each in inner if isinstance(each, (dict, list))]


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:24]} is too large")
    return number


def _countable(digits: str) -> int:
    # Python itself refuses thousands of digits, and LangGraph's checkpoints all that need more than 64 bits.
    number = int(digits) if len(digits) <= 20 else 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"the number {digits[:24]} has more than 64 bits")
    return number


STRICT_NUMBERS: dict[str, Any] = {"parse_constant": _no_number, "parse_float": _finite, "parse_int": _countable}
"""For `json.loads`: numbers that JSON, a float or 64 bits cannot carry raise a ValueError."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has the key {twice!r} twice")
    return dict(pairs)


# Finds where a value ends, whatever it holds.
_ENDS = json.JSONDecoder(strict=False, parse_int=len, parse_float=len)
_SURE = 12
"""Characters after a mistake in JSON from which more text cannot mend it: none of a literal, an escape or a number."""


class BrokenJsonError(ValueError):
    """Text that is no JSON value: where it is broken, and whether more text might mend it."""

    def __init__(self, message: str, at: int, *, unfinished: bool) -> None:
        super().__init__(message)
        self.at = at
        self.unfinished = unfinished


def end_of_json(text: str, begin: int) -> int:
    """The end of the JSON value that begins there; raises BrokenJsonError if there is none."""
    try:
        return _ENDS.raw_decode(text, begin)[1]
    except json.JSONDecodeError as error:
        open_string = error.msg.startswith("Unterminated string")
        unfinished = open_string or len(text) - error.pos < _SURE
        raise BrokenJsonError(f"no JSON: {error.msg}", error.pos, unfinished=unfinished) from None
    except RecursionError:
        raise BrokenJsonError("no JSON: nested too deep", begin, unfinished=False) from None


def skip_space(text: str, begin: int, also: str = "") -> int:
    """Where the next character is that is no white space, nor one of `also`."""
    while begin < len(text) and (text[begin].isspace() or text[begin] in also):
        begin += 1
    return begin


class JsonCalls(NamedTuple):
    """The texts of calls one after another, alone or in lists; where they end, and why early, if they do."""

    sources: list[str]
    end: int
    broken: BrokenJsonError | None = None


def read_calls(text: str, begin: int, separators: str) -> JsonCalls:
    """The calls from `begin` on; `separators` may be between two of them, as white space may."""
    sources, end = list[str](), begin
    while begin < len(text) and text[begin] in "{[":
        elements = list(_elements(text, begin)) if text[begin] == "[" else []
        try:
            end = end_of_json(text, begin)
        except BrokenJsonError as error:
            whole = list(takewhile(lambda place: text[place[0]] == "{", elements))
            sources += [text[first:last] for first, last in whole]
            return JsonCalls(sources, skip_space(text, whole[-1][1], ",") if whole else begin, error)
        sources += [text[first:last] for first, last in elements] or [text[begin:end]]
        begin = skip_space(text, end, separators)
    return JsonCalls(sources, end)


def _elements(text: str, begin: int) -> Iterator[tuple[int, int]]:
    """Where the elements of a JSON list are, those that are whole."""
    at = skip_space(text, begin + 1)
    while at < len(text) and text[at] != "]":
        try:
            end = end_of_json(text, at)
        except BrokenJsonError:
            return
        yield at, end
        at = skip_space(text, end, ",")


def parse_constrained(text: str, tools: Tools) -> ParsedReply:
    """Read a reply that was written in which only calls may be."""
    parsed = ParsedReply("")
    begin = skip_space(text, 0)
    found = read_calls(text, begin, "")
    for source in found.sources:
        parsed.add_source(source, tools)
    rest = text[found.end :].strip()
    if found.broken is not None:
        parsed.add_invalid(name_in(rest), rest, found.broken)
    elif rest or not found.sources:
        parsed.add_invalid(name_in(rest), text, "it is more, or less, than a call")
    return parsed


def invalid_call_messages(message: AIMessage) -> list[ToolMessage]:
    """For each call of a reply that could not be read, a message that tells the model so."""
    told = []
    for call in message.invalid_tool_calls:
        reason = call.get("error") or "its arguments are not a JSON object"
        # Small models call again only if the tool is named.
        name = call.get("name") or name_in(call.get("args") or "") or "the tool"
        again = f"Call {name} again, with arguments that are one JSON object."
        text = f"Error: this call could not be read ({reason}). {again}"
        told.append(ToolMessage(text, tool_call_id=call.get("id") or "", name=call.get("name"), status="error"))
    return told
