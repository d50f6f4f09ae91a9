"""Tool calls in a reply's text (Hermes format, as Qwen's chat template teaches it)."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import InvalidToolCall, ToolCall

from lookahead_agent.replies.thinking import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Small models often write the call as bare JSON, without the tags or in a code fence.
_UNTAGGED = ("```json", '{"name"', '{\n  "name"')
_UNTAGGED_CALL = re.compile(r'\{\s*"name"')

_TAGGED = re.compile(rf"{OPEN}\s*(.*?)\s*(?:{CLOSE}|(?={OPEN})|\Z)", re.DOTALL)
_FENCED = re.compile(r"```json\s*(\{.*?\})\s*```", re.DOTALL)


MARKERS = (OPEN, *_UNTAGGED)
"""Texts that begin a call."""


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

    def add(self, name: Any, arguments: Any, source: str) -> None:
        """Add a call that was read, or say why it is none.

        Args:
            name: Of the tool.
            arguments: A mapping, or JSON text of one.
            source: The text that was read.
        """
        try:
            if isinstance(arguments, str):
                arguments = json.loads(arguments or "{}")
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError("a call is {name: text, arguments: object}")
        except (json.JSONDecodeError, TypeError) as error:
            self.add_invalid(name if isinstance(name, str) else None, source, error)
        else:
            self.tool_calls.append(ToolCall(type="tool_call", name=name, args=arguments, id=_new_id()))

    def add_invalid(self, name: str | None, source: str, error: Exception | str) -> None:
        """Add a call that could not be read."""
        reason = error if isinstance(error, str) else f"not a tool call: {type(error).__name__}: {error}"
        self.invalid_tool_calls.append(
            InvalidToolCall(type="invalid_tool_call", name=name, args=source, id=_new_id(), error=reason)
        )


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


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
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments") or {}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        parsed.add_invalid(None, body, error)
    else:
        parsed.add(name, arguments, body)


def parse_constrained(text: str) -> ParsedReply:
    """Read a reply that was written under `call_constraint`."""
    try:
        calls = json.loads(text)
    except json.JSONDecodeError:  # it was cut off
        calls = None
    parsed = ParsedReply("")
    if isinstance(calls, list):
        for call in calls:
            _add(parsed, json.dumps(call))
    else:
        _add(parsed, text)
    return parsed


class ContentStream:
    """Passes on a reply's text as it comes, up to where a tool call begins.

    Args:
        markers: Texts that may begin a tool call.
        on_content: Given the pieces that are certainly content.
    """

    def __init__(self, markers: tuple[str, ...], on_content: Callable[[str], None]) -> None:
        self._markers = markers
        self._on_content = on_content
        self._text = ""
        self._passed_on = 0

    def push(self, text: str) -> None:
        """Add text."""
        self._text += text
        found = [at for marker in self._markers if (at := self._text.find(marker)) >= 0]
        end = min(found) if found else len(self._text) - held_back(self._text, self._markers)
        # White space before a call is no content.
        self._pass_on(len(self._text[:end].rstrip()) if self._markers else end)

    def finish(self, content: str) -> None:
        """Pass on what is left of the reply's final content."""
        if content.startswith(self._text[: self._passed_on]):
            self._text = content
            self._pass_on(len(content))

    def _pass_on(self, end: int) -> None:
        if end > self._passed_on:
            self._on_content(self._text[self._passed_on : end])
            self._passed_on = end
