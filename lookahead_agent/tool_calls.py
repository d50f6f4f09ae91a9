"""Tool calls in a reply's text (Hermes format, as Qwen's chat template teaches it)."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import InvalidToolCall, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Small models often write the call as bare JSON, without the tags or in a code fence.
_UNTAGGED = ("```json", '{"name"', '{\n  "name"')
_UNTAGGED_CALL = re.compile(r'\{\s*"name"')

_TAGGED = re.compile(rf"{OPEN}\s*(.*?)\s*(?:{CLOSE}|(?={OPEN})|\Z)", re.DOTALL)
_FENCED = re.compile(r"```json\s*(\{.*?\})\s*```", re.DOTALL)


def action_markers(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Texts after which a reply with these tools is an action: only the target may write it."""
    return (OPEN, *_UNTAGGED) if tools else ()


@dataclass
class ParsedReply:
    """A reply taken apart.

    Attributes:
        content: The text without the tool calls.
        tool_calls: Calls that could be read.
        invalid_tool_calls: Calls that could not, with the reason.
    """

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    invalid_tool_calls: list[InvalidToolCall] = field(default_factory=list)


def parse_reply(text: str, tool_names: Collection[str]) -> ParsedReply:
    """Find the tool calls in a reply.

    Calls inside `<tool_call>` tags are always read; JSON without tags only if it names one of `tool_names`.
    """
    if not tool_names:
        return ParsedReply(text)
    if OPEN in text:
        parsed = ParsedReply(_TAGGED.sub("", text).strip())
        for body in _TAGGED.findall(text):
            _add(parsed, body)
        return parsed
    parsed = ParsedReply(text)
    for candidate, span in _untagged(text):
        if _named(candidate) in tool_names:
            _add(parsed, candidate)
            parsed.content = parsed.content.replace(span, "")
    if parsed.tool_calls:
        parsed.content = parsed.content.strip()
    return parsed


def _untagged(text: str) -> list[tuple[str, str]]:
    """JSON objects that may be calls, each with the text it takes up."""
    if fenced := [(match[1], match[0]) for match in _FENCED.finditer(text)]:
        return fenced
    found: list[tuple[str, str]] = []
    end = 0
    while match := _UNTAGGED_CALL.search(text, end):
        try:
            _, end = json.JSONDecoder().raw_decode(text, match.start())
        except json.JSONDecodeError:
            break
        found.append((text[match.start() : end],) * 2)
    return found


def _named(body: str) -> str | None:
    try:
        call = json.loads(body)
    except json.JSONDecodeError:
        return None
    return call.get("name") if isinstance(call, dict) and "arguments" in call else None


def _add(parsed: ParsedReply, body: str) -> None:
    identifier = f"call_{uuid.uuid4().hex[:24]}"
    name = None
    try:
        call = json.loads(body)
        name = call["name"]
        arguments = call.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("a call is {name: text, arguments: object}")
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        reason = f"not a tool call: {type(error).__name__}: {error}"
        parsed.invalid_tool_calls.append(
            InvalidToolCall(type="invalid_tool_call", name=name, args=body, id=identifier, error=reason)
        )
    else:
        parsed.tool_calls.append(ToolCall(type="tool_call", name=name, args=arguments, id=identifier))


def call_constraint(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Constraint for `Sampling.structured`: the reply is a call of one of these tools."""
    schema = {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
    }
    return {"json": schema, "disable_any_whitespace": True}


class ContentStream:
    """Passes on a reply's text as it comes, up to where a tool call begins.

    Args:
        markers: Texts that may begin a tool call.
        on_content: Given the pieces that are certainly content.
    """

    def __init__(self, markers: Sequence[str], on_content: Callable[[str], None]) -> None:
        self._markers = markers
        self._on_content = on_content
        self._text = ""
        self._passed_on = 0

    def push(self, text: str) -> None:
        """Add text."""
        self._text += text
        found = [at for marker in self._markers if (at := self._text.find(marker)) >= 0]
        end = min(found) if found else len(self._text) - self._held()
        self._pass_on(end)

    def finish(self, content: str) -> None:
        """Pass on what is left of the reply's final content."""
        if content.startswith(self._text[: self._passed_on]):
            self._text = content
            self._pass_on(len(content))

    def _held(self) -> int:
        """Length of the text's end that may be the beginning of a marker."""
        for length in range(max((len(marker) for marker in self._markers), default=1) - 1, 0, -1):
            if any(marker.startswith(self._text[-length:]) for marker in self._markers if len(marker) > length):
                return min(length, len(self._text))
        return 0

    def _pass_on(self, end: int) -> None:
        if end > self._passed_on:
            self._on_content(self._text[self._passed_on : end])
            self._passed_on = end
