"""Tool calls that models write as JSON: Hermes' format, Llama's and Mistral's, with tags or without."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from lookahead_agent.generation.tool_calls import (
    BrokenJsonError,
    JsonCalls,
    ParsedReply,
    Tools,
    add_source,
    end_of_json,
    name_in,
    read_json,
    skip_space,
)


@dataclass(frozen=True)
class Found:
    """The text where a call may begin, read.

    Attributes:
        end: Where it ends.
        calls: What was read, its `content` the text beside the calls; None: no call, but text.
        rank: Calls of the lowest rank in a reply are its calls, the others are examples: 0 in the model's own format,
            1 bare JSON, 2 JSON in a code fence.
    """

    end: int
    calls: ParsedReply | None = None
    rank: int = 0


class ToolParser(Protocol):
    """Finds the tool calls in a reply, whose text may not be complete yet.

    The result of `read` depends on the text alone, never on when it is called.
    """

    @property
    def markers(self) -> tuple[str, ...] | None:
        """Texts that begin a tool call; None if they are not known."""
        ...

    @property
    def begins(self) -> re.Pattern[str]:
        """Where a call may begin."""
        ...

    @property
    def may_begin(self) -> re.Pattern[str]:
        """The end of a text, from where a call may begin once more text comes."""
        ...

    def read(self, text: str, at: int, tools: Tools, *, final: bool, cut: bool) -> Found | None:
        """Read on at a place where `begins` was found; None: more text is needed.

        Args:
            text: The reply, without its thinking.
            at: The place.
            tools: The tools that may be called.
            final: Whether no more text comes.
            cut: Whether the model had more to say then.
        """
        ...


def invalid(
    name: str | None, source: str, end: int, reason: Exception | str, *, cut: bool = False, rank: int = 0
) -> Found:
    """A text that could not be read as a call; `cut`: the reply was cut off in it."""
    calls = ParsedReply("")
    calls.add_invalid(name, source.strip(), _cut_off(reason, cut=cut))
    return Found(end, calls, rank)


def beginnings(*texts: str) -> str:
    """A pattern for the end of a text at which one of these texts may begin."""
    parts = {re.escape(text[:length]) for text in texts for length in range(1, len(text))}
    return rf"(?:{'|'.join(sorted(parts, key=len, reverse=True))})\Z" if parts else r"(?!)"


# Small models often write the call as bare JSON, without the tags or in a code fence.
_CALL = r'(?:\[\s*)?\{\s*"(?:name|type|id)"\s*:'
_FENCED = rf"`{{3,}}\w*\s*{_CALL}"
_HALF_OBJECT = r'\{\s*(?:"\w{0,4}(?:"\s*)?)?\Z'
_HALF_CALL = rf"{_HALF_OBJECT}|\[\s*(?:\Z|{_HALF_OBJECT})"
_HALF_FENCED = rf"`+\Z|`{{3,}}\w*\s*(?:\Z|{_HALF_CALL})"
_UNTAGGED = (
    "```json",
    *(f'{{{space}"{key}"' for space in ("", " ", "\n", "\n  ", "\n    ", "\n\t") for key in ("name", "type", "id")),
)
_FENCE_ENDS = re.compile(r"`{3,}")


class JsonToolParser:
    """Calls that are JSON, after a tag or without one: Hermes' format, which Qwen's chat template teaches, and Llama's.

    Args:
        opens: The tag before a call.
        closes: The tag after it; None: there is none.
        separators: Characters that may separate two calls after one tag, beside white space.
    """

    def __init__(self, opens: str = "<tool_call>", closes: str | None = "</tool_call>", separators: str = ",") -> None:
        self._opens = opens
        self._closes = closes
        self._separators = separators
        tags = [tag for tag in (opens, closes) if tag is not None]
        self._end = re.compile("|".join(map(re.escape, tags)))
        self._half_end = re.compile(rf"\Z|{beginnings(*tags)}")
        self.markers: tuple[str, ...] = (opens, *_UNTAGGED)
        self.begins = re.compile(f"{re.escape(opens)}|{_FENCED}|{_CALL}")
        self.may_begin = re.compile(f"{beginnings(opens)}|{_HALF_FENCED}|{_HALF_CALL}")

    def read(self, text: str, at: int, tools: Tools, *, final: bool, cut: bool) -> Found | None:
        """Read on where a call may begin."""
        if text.startswith(self._opens, at):
            return self._tagged(text, at, tools, final=final, cut=cut)
        return self._untagged(text, at, tools, final=final)

    def _tagged(self, text: str, at: int, tools: Tools, *, final: bool, cut: bool) -> Found | None:
        begin = skip_space(text, at + len(self._opens))
        if begin == len(text) and not final:
            return None
        if begin == len(text) or text[begin] not in "{[":
            return self._mentioned(text, at, begin, final=final, cut=cut)
        if self._closes is not None and not final and self._end.search(text, begin) is None:
            return None
        found = JsonCalls.read(text, begin, self._separators)
        calls = ParsedReply("")
        if found.broken is None:
            end = skip_space(text, found.end, self._separators)
            closing, rest = self._end.match(text, end), text[end:]
            if closing is None and not final and self._half_end.match(rest):
                return None
            if closing is not None and closing[0] == self._closes:
                end = closing.end()
            elif rest and self._closes is not None and self._closes.startswith(rest):
                end = len(text)
            elif closing is None and self._closes is None:
                end = found.end
            elif closing is None and not self._half_end.match(rest):
                end = -1
            if end >= 0:
                self._add(calls, text[at:end], found.sources, tools)
                return Found(end, calls)
        after = self._after_broken(text, found, final=final)
        if after is None:
            return None
        for source in found.sources if found.broken is not None else ():
            add_source(calls, source, tools)
        rest = self._without_tags(text[found.end if found.sources and found.broken is not None else at : after])
        reason = found.broken or f"there is more than calls before {self._closes}"
        calls.add_invalid(name_in(rest), rest, _cut_off(reason, cut=cut and after == len(text)))
        return Found(after, calls)

    def _add(self, calls: ParsedReply, whole: str, sources: list[str], tools: Tools) -> None:
        for source in sources:
            read = ParsedReply("")
            add_source(read, source, tools)
            if len(sources) == 1:
                for invalid in read.invalid_tool_calls:
                    invalid["args"] = self._without_tags(whole)
            calls.extend(read)

    def _after_broken(self, text: str, found: JsonCalls, *, final: bool) -> int | None:
        """Where a call ends that cannot be read; None: that is not known yet."""
        broken = found.broken
        if broken is not None and broken.unfinished:
            return len(text) if final else None
        closing = self._end.search(text, broken.at if broken is not None else found.end)
        if closing is None:
            return len(text) if final else None
        return closing.end() if closing[0] == self._closes else closing.start()

    def _mentioned(self, text: str, at: int, begin: int, *, final: bool, cut: bool) -> Found | None:
        """Read a tag that no JSON follows: a word of the answer, unless tags enclose a block."""
        said = Found(at + len(self._opens))
        if text[text.rfind("\n", 0, at) + 1 : at].strip():
            return (
                said if not (final and cut and begin == len(text)) else self._unreadable(text, at, len(text), cut=cut)
            )
        if self._closes is None:
            line_end = text.find("\n", begin)
            if line_end < 0 and not final:
                return None
            return self._unreadable(text, at, line_end if line_end >= 0 else len(text), cut=cut)
        close = text.find(self._closes, begin)
        if close < 0:
            if not final:
                return None
            return self._unreadable(text, at, len(text), cut=cut) if cut else said
        end = close + len(self._closes)
        line_end = text.find("\n", end)
        if line_end < 0 and not final:
            return None
        alone = not text[end : line_end if line_end >= 0 else len(text)].strip()
        return self._unreadable(text, at, end, cut=False) if alone and text[begin:close].strip() else said

    def _unreadable(self, text: str, at: int, end: int, *, cut: bool) -> Found:
        source = self._without_tags(text[at:end])
        return invalid(name_in(source), source, end, "it is no JSON", cut=cut)

    def _without_tags(self, source: str) -> str:
        source = source.strip().removeprefix(self._opens)
        return (source.removesuffix(self._closes) if self._closes is not None else source).strip()

    def _untagged(self, text: str, at: int, tools: Tools, *, final: bool) -> Found | None:
        fenced = text[at] == "`"
        begin = next(place for place in range(at, len(text)) if text[place] in "{[")
        said = Found(begin + 1)
        names = {tool["function"]["name"] for tool in tools}
        try:
            end = end_of_json(text, begin)
        except BrokenJsonError as error:
            name = name_in(text[begin:])
            if error.unfinished and not final:
                return None
            if name not in names:
                return said
            stop = (_FENCE_ENDS if fenced else self._end).search(text, error.at) if not error.unfinished else None
            if stop is None and not final:
                return None
            after = len(text) if stop is None else stop.end() if fenced else stop.start()
            return invalid(name, text[begin:after].rstrip("` \n"), after, error, rank=2 if fenced else 1)
        if not _names_tools(text[begin:end], names):
            # Fenced, it is code like other code. Else its parts are no calls either.
            return Found(at) if fenced else Found(end)
        if fenced:
            found = JsonCalls.read(text, begin, self._separators)
            end = skip_space(text, found.end, self._separators)
            unfinished = found.broken is not None and found.broken.unfinished
            if (unfinished or not text[end:].strip("`")) and not final:
                return None
            ticks = _FENCE_ENDS.match(text, end)
            if found.broken is not None or (ticks is None and end < len(text)):
                return Found(at)
            end = end if ticks is None else ticks.end()
            sources = found.sources
        else:
            sources = JsonCalls.read(text[:end], begin, "").sources
            following = skip_space(text, end, self._separators)
            if following == len(text) and not final:
                return None
            end = following if text[following : following + 1] in ("{", "[") else end
        calls = ParsedReply("")
        for source in sources:
            add_source(calls, source, tools)
        return Found(end, calls, 2 if fenced else 1)


def _names_tools(source: str, names: set[str]) -> bool:
    """Whether JSON without a tag is meant to call tools."""
    sources = JsonCalls.read(source, 0, "").sources
    for text in sources:
        try:
            call = read_json(text)
        except ValueError:
            return name_in(text) in names
        known = isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"] in names
        if not known or not call.keys() & {"arguments", "parameters", "args"}:
            return False
    return bool(sources)


def _cut_off(reason: Exception | str, *, cut: bool) -> str:
    return f"it was cut off ({reason})" if cut else str(reason)


class MistralToolParser:
    """`[TOOL_CALLS]` before a list of calls, or before each call as `name{…}` or `name[ARGS]{…}`."""

    markers: tuple[str, ...] = ("[TOOL_CALLS]",)
    begins = re.compile(re.escape("[TOOL_CALLS]"))
    may_begin = re.compile(beginnings("[TOOL_CALLS]"))
    _HEAD = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def read(self, text: str, at: int, tools: Tools, *, final: bool, cut: bool) -> Found | None:
        """Read the calls after a marker, up to the next."""
        begin = at + len(self.markers[0])
        following = self.begins.search(text, begin)
        calls = ParsedReply("")
        head = self._HEAD.match(text, begin)
        start = head.end() if head is not None else skip_space(text, begin)
        if start == len(text) or text[start] not in "{[":
            if not final and following is None:
                return None
            end = following.start() if following is not None else len(text)
            named = re.match(r"\s*([\w.-]*)\s*(?:\[(?:CALL_ID|ARGS)\]|\Z)", text[begin:end])
            if named is None or not (cut or any(tool["function"]["name"] == named[1] for tool in tools)):
                return Found(begin)
            return invalid(None, text[at:end], end, "it has no arguments", cut=cut and end == len(text))
        try:
            end = end_of_json(text, start)
        except BrokenJsonError as error:
            following = self.begins.search(text, error.at) if not error.unfinished else None
            if following is None and not final:
                return None
            end = following.start() if following is not None else len(text)
            found = JsonCalls.read(text[:end], start, "") if head is None else JsonCalls(end=at)
            for source in found.sources:
                add_source(calls, source, tools)
            rest = text[found.end if found.sources else at : end]
            name = head["name"] if head is not None else name_in(rest)
            calls.add_invalid(name, rest.strip(), _cut_off(error, cut=cut and end == len(text)))
            return Found(end, calls)
        if head is not None:
            calls.add(head["name"], text[start:end], text[at:end], tools)
        else:
            for source in JsonCalls.read(text[:end], start, "").sources:
                add_source(calls, source, tools)
            if not (calls.tool_calls or calls.invalid_tool_calls):
                calls.add_invalid(None, text[at:end], "the list is empty")
        return Found(end, calls)
