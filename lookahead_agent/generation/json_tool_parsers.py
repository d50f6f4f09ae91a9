"""Tool calls that models write as JSON: Hermes' format, Llama's and Mistral's, with tags or without."""

import re
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass

from lookahead_agent.generation.tool_calls import (
    BrokenJsonError,
    JsonCalls,
    ParsedReply,
    Tools,
    end_of_json,
    name_in,
    read_calls,
    read_json,
    skip_space,
)


@dataclass(frozen=True)
class Found:
    """The text where a call may begin, read."""

    end: int  # where it ends
    calls: ParsedReply | None = None  # what was read, its `content` the text beside the calls; None: no call, but text
    # Calls of the lowest rank in a reply are its calls, the others are examples: 0 in the model's own format, 1 bare
    # JSON, 2 JSON in a code fence.
    rank: int = 0


class ToolParser(ABC):
    """Finds the tool calls in a reply."""

    markers: tuple[str, ...] | None  # texts that begin a tool call; None if they are not known
    begins: re.Pattern[str]  # where a call may begin
    may_begin: re.Pattern[str]  # the end of a text, from where a call may begin once more text comes

    @abstractmethod
    def read(self, text: str, at: int, tools: Tools, *, cut: bool) -> Found:
        """Read on where `begins` was found in a whole reply without its thinking; `cut`: the model had more to say."""


def invalid(
    name: str | None, source: str, end: int, reason: Exception | str, *, cut: bool = False, rank: int = 0
) -> Found:
    """A text that could not be read as a call; `cut`: the reply was cut off in it."""
    calls = ParsedReply("")
    calls.add_invalid(name, source.strip(), reason, cut=cut)
    return Found(end, calls, rank)


def beginnings(*texts: str) -> str:
    """A pattern for the end of a text at which one of these texts may begin."""
    parts = {re.escape(text[:length]) for text in texts for length in range(1, len(text))}
    return rf"(?:{'|'.join(sorted(parts, key=len, reverse=True))})\Z"


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


@dataclass(eq=False)
class JsonToolParser(ToolParser):
    """Calls that are JSON, after a tag or without one: the formats of Hermes and Qwen, Llama, and Mistral."""

    _HEAD = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")

    opens: str = "<tool_call>"  # tag before a call
    closes: str | None = "</tool_call>"  # tag that may be behind it
    separators: str = ","  # characters that may be between two calls
    _: KW_ONLY
    named: bool = False  # whether a name may be before "{"

    def __post_init__(self) -> None:
        self._tags = [tag for tag in (self.opens, self.closes) if tag is not None]
        self._end = re.compile("|".join(map(re.escape, self._tags)))
        self.markers = (self.opens, *_UNTAGGED)
        self.begins = re.compile(f"{re.escape(self.opens)}|{_FENCED}|{_CALL}")
        self.may_begin = re.compile(f"{beginnings(self.opens)}|{_HALF_FENCED}|{_HALF_CALL}")

    def read(self, text: str, at: int, tools: Tools, *, cut: bool) -> Found:
        """Read on where a call may begin."""
        if text.startswith(self.opens, at):
            return self._tagged(text, at, tools, cut=cut)
        return self._untagged(text, at, tools)

    def _tagged(self, text: str, at: int, tools: Tools, *, cut: bool) -> Found:
        begin = skip_space(text, at + len(self.opens))
        if self.named and (head := self._HEAD.match(text, begin)) is not None:
            return self._arguments(text, at, head, tools, cut=cut)
        if begin == len(text) or text[begin] not in "{[":
            return self._mentioned(text, at, begin, cut=cut)
        found = read_calls(text, begin, self.separators)
        calls = ParsedReply("")
        if found.broken is None:
            end = skip_space(text, found.end, self.separators)
            closing, rest = self._end.match(text, end), text[end:]
            if closing is not None and closing[0] == self.closes:
                end = closing.end()
            elif closing is None and self.closes is None:
                end = found.end
            elif rest and self.closes is not None and self.closes.startswith(rest):
                end = len(text)
            if closing is not None or self.closes is None or any(tag.startswith(rest) for tag in self._tags):
                self._add(calls, text[at:end], found.sources, tools)
                return Found(end, calls)
        after = self._after_broken(text, found)
        for source in found.sources if found.broken is not None else ():
            calls.add_source(source, tools)
        rest = self._without_tags(text[found.end if found.sources and found.broken is not None else at : after])
        reason = found.broken or f"there is more than calls before {self.closes}"
        calls.add_invalid(name_in(rest), rest, reason, cut=cut and after == len(text))
        return Found(after, calls)

    def _arguments(self, text: str, at: int, head: re.Match[str], tools: Tools, *, cut: bool) -> Found:
        try:
            end = end_of_json(text, head.end())
        except BrokenJsonError as error:
            following = None if error.unfinished else self._end.search(text, error.at)
            end = len(text) if following is None else following.start()
            return invalid(head["name"], text[at:end], end, error, cut=cut and end == len(text))
        calls = ParsedReply("")
        calls.add(head["name"], text[head.end() : end], text[at:end], tools)
        return Found(end, calls)

    def _add(self, calls: ParsedReply, whole: str, sources: list[str], tools: Tools) -> None:
        for source in sources:
            calls.add_source(source, tools)
        if len(sources) == 1:
            for invalid in calls.invalid_tool_calls:
                invalid["args"] = self._without_tags(whole)

    def _after_broken(self, text: str, found: JsonCalls) -> int:
        broken = found.broken
        if broken is not None and broken.unfinished:
            return len(text)
        closing = self._end.search(text, broken.at if broken is not None else found.end)
        if closing is None:
            return len(text)
        return closing.end() if closing[0] == self.closes else closing.start()

    def _mentioned(self, text: str, at: int, begin: int, *, cut: bool) -> Found:
        """Read a tag that no JSON follows: a word of the answer, unless tags enclose a block."""
        said = Found(at + len(self.opens))
        if text[text.rfind("\n", 0, at) + 1 : at].strip():
            return self._unreadable(text, at, len(text), cut=True) if cut and begin == len(text) else said
        if self.closes is None:
            end = _line_end(text, begin)
            return self._unreadable(text, at, end, cut=cut and end == len(text))
        close = text.find(self.closes, begin)
        if close < 0:
            return self._unreadable(text, at, len(text), cut=True) if cut else said
        end = close + len(self.closes)
        alone = not text[end : _line_end(text, end)].strip()
        return self._unreadable(text, at, end, cut=False) if alone and text[begin:close].strip() else said

    def _unreadable(self, text: str, at: int, end: int, *, cut: bool) -> Found:
        source = self._without_tags(text[at:end])
        return invalid(name_in(source), source, end, "it is no JSON", cut=cut)

    def _without_tags(self, source: str) -> str:
        source = source.strip().removeprefix(self.opens)
        return (source.removesuffix(self.closes) if self.closes is not None else source).strip()

    def _untagged(self, text: str, at: int, tools: Tools) -> Found:
        fenced = text[at] == "`"
        begin = next(place for place in range(at, len(text)) if text[place] in "{[")
        names = {tool["function"]["name"] for tool in tools}
        try:
            end = end_of_json(text, begin)
        except BrokenJsonError as error:
            name = name_in(text[begin:])
            if name not in names:
                return Found(begin + 1)
            stop = (_FENCE_ENDS if fenced else self._end).search(text, error.at) if not error.unfinished else None
            after = len(text) if stop is None else stop.end() if fenced else stop.start()
            return invalid(name, text[begin:after].rstrip("` \n"), after, error, rank=2 if fenced else 1)
        if not _names_tools(text[begin:end], names):
            # Fenced, it is code like other code. Else its parts are no calls either.
            return Found(at) if fenced else Found(end)
        if fenced:
            found = read_calls(text, begin, self.separators)
            end = skip_space(text, found.end, self.separators)
            ticks = _FENCE_ENDS.match(text, end)
            if found.broken is not None or (ticks is None and end < len(text)):
                return Found(at)
            end = end if ticks is None else ticks.end()
        else:
            found = read_calls(text[:end], begin, "")
            following = skip_space(text, end, self.separators)
            end = following if text[following : following + 1] in ("{", "[") else end
        calls = ParsedReply("")
        for source in found.sources:
            calls.add_source(source, tools)
        return Found(end, calls, 2 if fenced else 1)


def _line_end(text: str, begin: int) -> int:
    end = text.find("\n", begin)
    return end if end >= 0 else len(text)


def _names_tools(source: str, names: set[str]) -> bool:
    """Whether JSON without a tag is meant to call tools."""
    sources = read_calls(source, 0, "").sources
    for text in sources:
        try:
            call = read_json(text)
        except ValueError:
            return name_in(text) in names
        known = isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"] in names
        if not known or not call.keys() & {"arguments", "parameters", "args"}:
            return False
    return bool(sources)
