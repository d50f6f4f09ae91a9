"""Parses tool calls in JSON: the formats of Hermes, Llama and Mistral, with or without tags."""

import re
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass

from lookahead_agent.generation.scanned_text import ScannedText
from lookahead_agent.generation.tool_calls import (
    NAME,
    BrokenJsonError,
    JsonCalls,
    ParsedReply,
    Tools,
    find_name,
    json_end,
    parse_strict_json,
    read_calls,
    skip_whitespace,
    value_sources,
)


@dataclass(frozen=True)
class ParsedSpan:
    """The parsed text at a place where a call may begin."""

    end: int  # end of the parsed text
    calls: ParsedReply | None = None  # the calls, with the text beside them as `content`; None: text without calls
    # Only calls of the lowest rank in a reply count, the others are examples: 0 in the model's own format, 1 bare JSON,
    # 2 JSON in a code fence.
    rank: int = 0


class ToolParser(ABC):
    """Finds the tool calls in a reply."""

    markers: tuple[str, ...] | None  # texts that begin a tool call; None: unknown
    begins: re.Pattern[str]  # matches where a call may begin
    may_begin: re.Pattern[str]  # matches the end of a text where a call may begin once more text arrives

    # The patterns match possessively, and a run of backticks only from its beginning: hostile text takes linear time.

    @abstractmethod
    def read(self, reply: ScannedText, at: int, tools: Tools, *, truncated: bool) -> ParsedSpan:
        """Parse a whole reply without thinking from a match of `begins`; `truncated`: the model had more to say."""


def invalid(
    name: str | None, source: str, end: int, reason: Exception | str, *, truncated: bool = False, rank: int = 0
) -> ParsedSpan:
    """Return a text as an invalid call; `truncated`: the reply was cut off in it."""
    calls = ParsedReply("")
    calls.add_invalid(name, source.strip(), reason, truncated=truncated)
    return ParsedSpan(end, calls, rank)


def prefix_pattern(*texts: str) -> str:
    """Return a pattern for the end of a text where one of these texts may begin."""
    parts = {re.escape(text[:length]) for text in texts for length in range(1, len(text))}
    return rf"(?:{'|'.join(sorted(parts, key=len, reverse=True))})\Z"


def is_rest_of(tag: str, text: str, at: int) -> bool:
    """Return whether the text from `at` on is empty, or the beginning of a tag."""
    return len(text) - at <= len(tag) and tag.startswith(text[at:])


# Small models often write the call as bare JSON, without the tags or in a code fence.
_CALL = r'(?:\[\s*+)?\{\s*+"(?:name|type|id)"\s*+:'
_FENCED = rf"(?<!`)`{{3,}}+\w*+\s*+{_CALL}"
_PARTIAL_OBJECT = r'\{\s*+(?:"\w{0,4}+(?:"\s*+)?)?\Z'
_PARTIAL_CALL = rf"{_PARTIAL_OBJECT}|\[\s*+(?:\Z|{_PARTIAL_OBJECT})"
_PARTIAL_FENCED = rf"(?<!`)(?:`++\Z|`{{3,}}+\w*+\s*+(?:\Z|{_PARTIAL_CALL}))"
_UNTAGGED = (
    "```json",
    *(f'{{{space}"{key}"' for space in ("", " ", "\n", "\n  ", "\n    ", "\n\t") for key in ("name", "type", "id")),
)
_FENCE_ENDS = re.compile(r"`{3,}")
_BRACKET = re.compile(r"[{\[]")


@dataclass(eq=False)
class JsonToolParser(ToolParser):
    """Parses JSON calls with or without a tag, in the formats of Hermes and Qwen, Llama, and Mistral."""

    _HEAD = re.compile(r"\s*+(?P<name>[\w.-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?(?:\[ARGS\])?\s*+(?=\{)")

    opens: str = "<tool_call>"  # tag before a call
    closes: str | None = "</tool_call>"  # tag that may follow a call
    separators: str = ","  # characters that may separate two calls
    _: KW_ONLY
    named: bool = False  # whether the tool's name may precede "{"

    def __post_init__(self) -> None:
        self._tags = [tag for tag in (self.opens, self.closes) if tag is not None]
        self._end = re.compile("|".join(map(re.escape, self._tags)))
        self.markers = (self.opens, *_UNTAGGED)
        self.begins = re.compile(f"{re.escape(self.opens)}|{_FENCED}|{_CALL}")
        self.may_begin = re.compile(f"{prefix_pattern(self.opens)}|{_PARTIAL_FENCED}|{_PARTIAL_CALL}")

    def read(self, reply: ScannedText, at: int, tools: Tools, *, truncated: bool) -> ParsedSpan:
        """Parse the text from a place where a call may begin."""
        if reply.text.startswith(self.opens, at):
            return self._parse_tagged(reply, at, tools, truncated=truncated)
        return self._parse_untagged(reply, at, tools)

    def _parse_tagged(self, reply: ScannedText, at: int, tools: Tools, *, truncated: bool) -> ParsedSpan:
        text = reply.text
        begin = skip_whitespace(text, at + len(self.opens))
        if self.named and (head := self._HEAD.match(text, begin)) is not None:
            return self._parse_named(text, at, head, tools, truncated=truncated)
        if begin == len(text) or text[begin] not in "{[":
            return self._parse_bare_tag(reply, at, begin, truncated=truncated)
        found = read_calls(text, begin, self.separators)
        calls = ParsedReply("")
        if found.broken is None:
            end = skip_whitespace(text, found.end, self.separators)
            closing = self._end.match(text, end)
            if closing is not None and closing[0] == self.closes:
                end = closing.end()
            elif closing is None and self.closes is None:
                end = found.end
            elif self.closes is not None and is_rest_of(self.closes, text, end):
                end = len(text)
            is_complete = closing is not None or self.closes is None
            if is_complete or any(is_rest_of(tag, text, end) for tag in self._tags):
                self._add_calls(calls, text[at:end], found.sources, tools)
                return ParsedSpan(end, calls)
        after = self._after_broken(text, found)
        calls.add_sources(found.sources if found.broken is not None else [], tools)
        rest = self._without_tags(text[found.end if found.sources and found.broken is not None else at : after])
        reason = found.broken or f"there is more than calls before {self.closes}"
        calls.add_invalid(find_name(rest), rest, reason, truncated=truncated and after == len(text))
        return ParsedSpan(after, calls)

    def _parse_named(self, text: str, at: int, head: re.Match[str], tools: Tools, *, truncated: bool) -> ParsedSpan:
        try:
            end = json_end(text, head.end())
        except BrokenJsonError as error:
            following = None if error.unfinished else self._end.search(text, error.at)
            end = len(text) if following is None else following.start()
            return invalid(head["name"], text[at:end], end, error, truncated=truncated and end == len(text))
        calls = ParsedReply("")
        calls.add(head["name"], text[head.end() : end], text[at:end], tools)
        return ParsedSpan(end, calls)

    def _add_calls(self, calls: ParsedReply, whole: str, sources: list[str], tools: Tools) -> None:
        calls.add_sources(sources, tools)
        if len(sources) == 1:
            for invalid_call in calls.invalid_tool_calls:
                invalid_call["args"] = self._without_tags(whole)

    def _after_broken(self, text: str, found: JsonCalls) -> int:
        broken = found.broken
        if broken is not None and broken.unfinished:
            return len(text)
        closing = self._end.search(text, broken.at if broken is not None else found.end)
        if closing is None:
            return len(text)
        return closing.end() if closing[0] == self.closes else closing.start()

    def _parse_bare_tag(self, reply: ScannedText, at: int, begin: int, *, truncated: bool) -> ParsedSpan:
        """Parse a tag without JSON: text of the answer, unless tags enclose a block."""
        text, as_text = reply.text, ParsedSpan(at + len(self.opens))
        if not reply.is_blank(reply.line_begin(at), at):
            return self._invalid(text, at, len(text), truncated=True) if truncated and begin == len(text) else as_text
        if self.closes is None:
            end = reply.find("\n", begin)
            return self._invalid(text, at, end, truncated=truncated and end == len(text))
        close = reply.find(self.closes, begin)
        if close == len(text):
            return self._invalid(text, at, len(text), truncated=True) if truncated else as_text
        end = close + len(self.closes)
        is_block = begin < close and reply.is_blank(end, reply.find("\n", end))
        return self._invalid(text, at, end, truncated=False) if is_block else as_text

    def _invalid(self, text: str, at: int, end: int, *, truncated: bool) -> ParsedSpan:
        source = self._without_tags(text[at:end])
        return invalid(find_name(source), source, end, "it is not JSON", truncated=truncated)

    def _without_tags(self, source: str) -> str:
        source = source.strip().removeprefix(self.opens)
        return (source.removesuffix(self.closes) if self.closes is not None else source).strip()

    def _parse_untagged(self, reply: ScannedText, at: int, tools: Tools) -> ParsedSpan:
        text = reply.text
        fenced = text[at] == "`"
        begin = _BRACKET.search(text, at).start()  # type: ignore[union-attr]
        names = {tool["function"]["name"] for tool in tools}
        try:
            end = reply.json_end(begin)
        except BrokenJsonError as error:
            named = reply.search(NAME, begin)
            if named is None or named[1] not in names:
                return ParsedSpan(begin + 1)
            stop = (_FENCE_ENDS if fenced else self._end).search(text, error.at) if not error.unfinished else None
            after = len(text) if stop is None else stop.end() if fenced else stop.start()
            return invalid(named[1], text[begin:after].rstrip("` \n"), after, error, rank=2 if fenced else 1)
        if not _names_tools(text[begin:end], names):
            # In a fence it is ordinary code. Bare JSON is skipped as a whole, since its parts are not calls either.
            return ParsedSpan(at) if fenced else ParsedSpan(end)
        sources = value_sources(text, begin, end)
        if fenced:
            found = read_calls(text, begin, self.separators)
            sources, end = found.sources, skip_whitespace(text, found.end, self.separators)
            ticks = _FENCE_ENDS.match(text, end)
            if found.broken is not None or (ticks is None and end < len(text)):
                return ParsedSpan(at)
            end = end if ticks is None else ticks.end()
        else:
            following = skip_whitespace(text, end, self.separators)
            end = following if text[following : following + 1] in ("{", "[") else end
        calls = ParsedReply("")
        calls.add_sources(sources, tools)
        return ParsedSpan(end, calls, 2 if fenced else 1)


def _names_tools(source: str, names: set[str]) -> bool:
    """Return whether JSON without a tag is meant to call tools."""
    sources = value_sources(source, 0, len(source))
    for text in sources:
        try:
            call = parse_strict_json(text)
        except ValueError:
            return find_name(text) in names
        known = isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"] in names
        if not known or not call.keys() & {"arguments", "parameters", "args"}:
            return False
    return bool(sources)
