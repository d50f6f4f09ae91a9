"""Tool calls: strict parsing of their JSON, and the errors of calls that cannot be parsed."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, NamedTuple

from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.messages.tool import invalid_tool_call, tool_call

Tools = Sequence[Mapping[str, Any]]  # tools in OpenAI's format

_ARGUMENTS = ("arguments", "parameters", "args")  # Keys under which models write a call's arguments
_MAX_DEPTH = 100  # levels of objects and lists in a call
_IGNORED_KEYS = frozenset({"id", "type"})
_SURROGATE = re.compile("[\ud800-\udfff]")
NAME = re.compile(r'"name"\s*+:\s*+"([^"\\]*+)"')
"""A key "name" in JSON, and its value."""
MAX_CALLS = 128
"""Calls of a reply that are parsed one by one; the rest of a longer reply is one invalid call."""
TOO_MANY_CALLS = f"a reply has at most {MAX_CALLS} calls"
UNREADABLE = "(unreadable) "  # Precedes the text of an invalid call: see `as_invalid_json`


@dataclass
class ParsedReply:
    """A reply's text, its tool calls, and its invalid calls with the reason."""

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    invalid_tool_calls: list[InvalidToolCall] = field(default_factory=list)

    def add(self, name: Any, arguments: Any, source: str, tools: Tools) -> None:
        """Add the call that was parsed from `source`, or an invalid call with the reason."""
        # The tool may be unknown: LangGraph's `ToolNode` lists the tools to the model.
        try:
            if not isinstance(name, str) or not name or _SURROGATE.search(name):
                raise ValueError("it names no tool")
            if isinstance(arguments, str):
                arguments = parse_strict_json(arguments)
            if arguments is None and has_no_parameters(name, tools):
                arguments = {}
            if not isinstance(arguments, dict):
                raise ValueError("its arguments are not a JSON object")
            # Arguments from other parsers are parsed again, strictly.
            arguments = parse_strict_json(json.dumps(arguments))
        except (ValueError, TypeError, RecursionError) as error:
            self.add_invalid(name if isinstance(name, str) else None, source, error)
        else:
            self.tool_calls.append(tool_call(name=name, args=arguments, id=f"call_{uuid.uuid4().hex[:24]}"))

    def add_sources(self, sources: Sequence[str], tools: Tools) -> None:
        """Add a call for each JSON text; those beyond `MAX_CALLS` are invalid."""
        for source in sources[:MAX_CALLS]:
            self.add_source(source, tools)
        for source in sources[MAX_CALLS:]:
            self.add_invalid(find_name(source), source, TOO_MANY_CALLS)

    def add_source(self, source: str, tools: Tools) -> None:
        """Add a call from its JSON text, `{"name": …, "arguments": …}`, or an invalid call with the reason."""
        # "parameters" and "args" count as "arguments" if there is only one of them. Without a key the call is invalid,
        # unless the tool has no parameters.
        name: Any = find_name(source)
        try:
            call = parse_strict_json(source)
            if not isinstance(call, dict):
                raise ValueError("it is not a JSON object")
            name = call.get("name")
            keys = [key for key in _ARGUMENTS if key in call]
            if unknown := sorted(call.keys() - {"name", *_ARGUMENTS} - _IGNORED_KEYS):
                raise ValueError(f"a call has a name and arguments, not {', '.join(map(repr, unknown))}")
            if len(keys) > 1:
                raise ValueError(f"it has {' and '.join(map(repr, keys))}: which are its arguments?")
            if not keys and not has_no_parameters(name, tools):
                raise ValueError('it has no "arguments"')
        except ValueError as error:
            self.add_invalid(name, source, error)
        else:
            self.add(name, call[keys[0]] if keys else None, source, tools)

    def add_invalid(self, name: Any, source: str, error: Exception | str, *, truncated: bool = False) -> None:
        """Add a text that is not a valid call, with the reason; `truncated`: the reply was cut off in it."""
        valid_name = name if isinstance(name, str) and name and not _SURROGATE.search(name) else None
        reason = f"not a tool call: it was cut off ({error})" if truncated else f"not a tool call: {error}"
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        self.invalid_tool_calls.append(invalid_tool_call(name=valid_name, args=source, id=call_id, error=reason))

    def keep_one_call(self) -> None:
        """Drop all calls but the first valid one, or the first invalid one if none is valid."""
        del self.tool_calls[1:]
        del self.invalid_tool_calls[0 if self.tool_calls else 1 :]

    def reject_other_tools(self, required: Mapping[str, Any]) -> None:
        """Make calls of other tools than the required one invalid."""
        name = required["function"]["name"]
        calls, self.tool_calls = self.tool_calls, []
        for call in calls:
            if call["name"] == name:
                self.tool_calls.append(call)
            else:
                source = json.dumps({"name": call["name"], "arguments": call["args"]}, ensure_ascii=False)
                self.add_invalid(call["name"], source, f"the reply had to call {name}")

    @property
    def count(self) -> int:
        """The number of calls, valid or invalid."""
        return len(self.tool_calls) + len(self.invalid_tool_calls)


def as_invalid_json(source: str) -> str:
    """Return the text of an invalid call, marked where LangChain or a client would complete it as JSON."""
    # Completed, it would run a tool with half a path or with defaults. Text that cannot begin JSON needs no mark.
    first = source.lstrip()[:1]
    return source if first and first not in '{["-0123456789tfnNI' else f"{UNREADABLE}{source}"


def calls_as_text(
    calls: Sequence[ToolCall], invalid: Sequence[InvalidToolCall]
) -> list[tuple[str | None, str | None, str]]:
    """Return id, name and arguments of valid and invalid calls; the latter are marked so that nobody completes them."""
    valid = [(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in calls]
    return valid + [(call["id"], call["name"], as_invalid_json(call["args"] or "")) for call in invalid]


def has_no_parameters(name: Any, tools: Tools) -> bool:
    """Return whether the tool of this name has no parameters."""
    schemas = [tool["function"].get("parameters") or {} for tool in tools if tool["function"]["name"] == name]
    return (
        bool(schemas)
        and schemas[0].keys() <= {"type", "properties", "title", "description", "required"}
        and not (schemas[0].get("properties") or schemas[0].get("required"))
    )


def find_name(text: str) -> str | None:
    """Return the name in a call whose JSON is invalid or incomplete; None if it has none."""
    found = NAME.search(text)
    return found[1] if found else None


# JSON


def parse_strict_json(text: str) -> Any:
    """Parse JSON strictly; raises ValueError for invalid JSON, a duplicate key, NaN, or half a surrogate pair."""
    # ValueError also for levels, floats and integers beyond the limits of JSON readers and checkpoints.
    try:
        value = json.loads(text, strict=False, object_pairs_hook=reject_duplicates, **STRICT_NUMBERS)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if sum(1 for _ in levels(value)) > _MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    if _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("it has half a surrogate pair, which is not a character")
    return value


def loads(text: str, **options: Any) -> Any:
    """Parse JSON, with options of `json.loads`; raises ValueError for invalid JSON, such as NaN."""
    try:
        return json.loads(text, strict=False, parse_constant=_reject_nan, **options)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def is_json(text: str) -> bool:
    """Return whether a text is one complete JSON value."""
    try:
        loads(text)
    except ValueError:
        return False
    return True


def levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values within nested objects and lists, level by level, the outermost first."""
    nested = [value] if isinstance(value, (dict, list)) else []
    while nested:
        yield (inner := [child for outer in nested for child in (outer.values() if isinstance(outer, dict) else outer)])
        nested = [child for child in inner if isinstance(child, (dict, list))]


def _reject_nan(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _parse_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:24]} is too large")
    return number


def _parse_int(digits: str) -> int:
    # Python refuses thousands of digits, and LangGraph's checkpoints integers of more than 64 bits.
    number = int(digits) if len(digits) <= 20 else 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"the number {digits[:24]} has more than 64 bits")
    return number


STRICT_NUMBERS: dict[str, Any] = {"parse_constant": _reject_nan, "parse_float": _parse_float, "parse_int": _parse_int}
"""Arguments of `json.loads` that raise ValueError for numbers beyond JSON, a float or 64 bits."""


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object as `object_pairs_hook`; raises ValueError for a key that occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((duplicate, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {duplicate!r} twice")
    return fields


# Finds the end of a value, whose numbers may have any length.
_END_DECODER = json.JSONDecoder(strict=False, parse_int=len, parse_float=len)
_WINDOW = 512  # characters of the text that are parsed first
_REPAIRABLE_LENGTH = 12
"""Characters after a JSON error from which more text repairs nothing: partial literals, escapes, numbers are short."""


class BrokenJsonError(ValueError):
    """Text that is not a JSON value: the position of the error, and whether more text might repair it."""

    def __init__(self, message: str, at: int, *, unfinished: bool) -> None:
        super().__init__(message)
        self.at = at
        self.unfinished = unfinished


def json_end(text: str, begin: int) -> int:
    """Return the end of the JSON value that begins at `begin`; raises BrokenJsonError if there is none."""
    # The text is decoded in windows: an error of `json` counts the lines before it.
    size = _WINDOW
    while True:
        window = text[begin : begin + size]
        is_last = begin + size >= len(text)
        try:
            end: int = _END_DECODER.raw_decode(window)[1]
            if is_last or end < len(window):
                return begin + end
        except json.JSONDecodeError as error:
            unfinished = error.msg.startswith("Unterminated string") or len(window) - error.pos < _REPAIRABLE_LENGTH
            if is_last or not unfinished:
                raise BrokenJsonError(f"no JSON: {error.msg}", begin + error.pos, unfinished=unfinished) from None
        except RecursionError:
            raise BrokenJsonError("no JSON: nested too deep", begin, unfinished=False) from None
        size *= 4


def skip_whitespace(text: str, begin: int, also: str = "") -> int:
    """Return the position of the next character that is neither white space nor one of `also`."""
    while begin < len(text) and (text[begin].isspace() or text[begin] in also):
        begin += 1
    return begin


class JsonCalls(NamedTuple):
    """The texts of consecutive calls, alone or in lists; their end, and the error if they end early."""

    sources: list[str]
    end: int
    broken: BrokenJsonError | None = None


def read_calls(text: str, begin: int, separators: str) -> JsonCalls:
    """Find consecutive calls from `begin` on, which white space and `separators` may separate."""
    sources, end = list[str](), begin
    while begin < len(text) and text[begin] in "{[":
        if len(sources) >= MAX_CALLS:
            return JsonCalls(sources, begin, BrokenJsonError(TOO_MANY_CALLS, begin, unfinished=False))
        try:
            end = json_end(text, begin)
        except BrokenJsonError as error:
            elements = islice(_elements(text, begin), MAX_CALLS) if text[begin] == "[" else ()
            complete = list(takewhile(lambda span: text[span[0]] == "{", elements))
            sources += [text[first:last] for first, last in complete]
            return JsonCalls(sources, skip_whitespace(text, complete[-1][1], ",") if complete else begin, error)
        sources += value_sources(text, begin, end)
        begin = skip_whitespace(text, end, separators)
    return JsonCalls(sources, end)


def value_sources(text: str, begin: int, end: int) -> list[str]:
    """Return the texts of the elements of a complete JSON value, or of the value itself if it is not a list.

    The elements beyond `MAX_CALLS` are one text.
    """
    elements = list(islice(_elements(text, begin), MAX_CALLS + 1)) if text[begin] == "[" else []
    sources = [text[first:last] for first, last in elements] or [text[begin:end]]
    if len(elements) > MAX_CALLS:
        sources[-1] = text[elements[-1][0] : end - 1].rstrip()
    return sources


def _elements(text: str, begin: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of the complete elements of a JSON list."""
    at = skip_whitespace(text, begin + 1)
    while at < len(text) and text[at] != "]":
        try:
            end = json_end(text, at)
        except BrokenJsonError:
            return
        yield at, end
        at = skip_whitespace(text, end, ",")


def parse_constrained(text: str, tools: Tools) -> ParsedReply:
    """Parse a reply that was constrained to calls."""
    parsed = ParsedReply("")
    begin = skip_whitespace(text, 0)
    found = read_calls(text, begin, "")
    parsed.add_sources(found.sources, tools)
    rest = text[found.end :].strip()
    if found.broken is not None:
        parsed.add_invalid(find_name(rest), rest, found.broken)
    elif rest or not found.sources:
        parsed.add_invalid(find_name(rest), text, "it is more, or less, than a call")
    return parsed
