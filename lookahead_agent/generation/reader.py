"""Parses a reply into thinking, answer and tool calls, for streams and complete replies alike."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.generation.backend import TextDelta
from lookahead_agent.generation.json_tool_parsers import ToolParser
from lookahead_agent.generation.tool_calls import ParsedReply, Tools, skip_whitespace

_NO_MATCH = re.compile(r"(?!)")
_FENCE = re.compile(r"`{3,}|~{3,}")
_TICKS = re.compile(r"`+")


@dataclass
class ReadReply:
    """A parsed reply: answer and calls, the thinking with its spans in the text, and text that is not emitted yet."""

    parsed: ParsedReply = field(default_factory=lambda: ParsedReply(""))
    thinking: str = ""
    thinking_spans: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[TextDelta] = field(default_factory=list)

    def thinking_tokens(self, text_ends: Sequence[int]) -> int:
        """Count the tokens of the thinking, given the length of the text after each token, shape (n,)."""
        begins = (0, *text_ends)
        return sum(any(begin <= at < end for begin, end in self.thinking_spans) for at in begins[: len(text_ends)])


@dataclass(eq=False)
class ReplyReader:
    """Parses one reply: emits text that is certain while the model writes, and parses the whole at the end."""

    # Thinking is the text between the tags, or the text before an unopened closing tag if the model always thinks.
    # White space around thinking and calls is dropped, tags in code are text, and only calls of the lowest rank count.

    thinking: ThinkingTags | None
    inside: bool  # whether the reply begins inside its thinking
    after: bool  # whether the reply begins after its thinking
    parser: ToolParser | None
    tools: Tools
    emit: Callable[[TextDelta], None]

    def __post_init__(self) -> None:
        self._has_thinking = self.inside
        self._open_optional = self.thinking is not None and self.thinking.always and not self.inside and not self.after
        self._whole = ""
        self._text = ""  # thinking that is not emitted yet, or the answer from its beginning
        self._emitted_to = 0  # position up to which the answer is emitted
        self._state = "answer" if self.thinking is None else "thinking" if self.inside else "begin"
        self._emitted = {"thinking": "", "answer": ""}
        self._held_space = ""  # white space that is emitted only if more text follows
        self._truncated = False
        self._offset = 0  # position of the answer in the reply
        self._line_floor = 0  # earliest start of the line: the end of the last call, thinking or code in it
        self._spans: list[tuple[int, int]] = []
        # Text; calls, with their rank and the text that replaces them if they do not count; None for thinking
        self._parts: list[str | tuple[ParsedReply, int, str] | None] = []

    def push(self, text: str) -> None:
        """Add generated text, and emit what is certain."""
        self._whole += text
        if self.thinking is None and self.parser is None:
            self._emitted["answer"] += text
            self.emit(TextDelta("answer", text))
            return
        self._text += text
        if self._state == "begin":
            self._push_begin()
        if self._state == "thinking":
            self._push_thinking()
        if self._state == "answer":
            self._push_answer()

    def finish(self, truncated: bool) -> ReadReply:
        """Parse the whole reply; `truncated`: the token limit or a stop string cut it off."""
        reply = self._parse(truncated)
        rest = (
            TextDelta("thinking", reply.thinking[len(self._emitted["thinking"]) :]),
            TextDelta("answer", reply.parsed.content[len(self._emitted["answer"]) :]),
        )
        reply.pieces = [piece for piece in rest if piece.text]
        return reply

    def _push_begin(self) -> None:
        assert self.thinking is not None
        text = self._text.lstrip()
        if text.startswith(self.thinking.open):
            self._text, self._state, self._has_thinking = text[len(self.thinking.open) :], "thinking", True
        elif not self.thinking.open.startswith(text):
            self._state = "held" if self._open_optional else "answer"

    def _push_thinking(self) -> None:
        assert self.thinking is not None
        close = self._text.find(self.thinking.close)
        end = close if close >= 0 else len(self._text) - _partial_tag(self._text, self.thinking.close)
        self._emit_text("thinking", self._text[:end])
        self._text = self._text[end:]
        if close >= 0:
            self._text, self._state, self._held_space = self._text[len(self.thinking.close) :], "answer", ""

    def _push_answer(self) -> None:
        """Emit the text before the first place where a call or thinking may begin."""
        text, at, end = self._text, self._emitted_to, len(self._text)
        found = self.parser.begins.search(text, at) if self.parser is not None else None
        begins = [found.start()] if found is not None else []
        if self.thinking is not None and (opened := text.find(self.thinking.open, at)) >= 0:
            begins.append(opened)
        if begins:
            end, self._state = min(begins), "held"
        else:
            if self.parser is not None and (partial := self.parser.may_begin.search(text, at)) is not None:
                end = partial.start()
            if self.thinking is not None:
                end = min(end, len(text) - _partial_tag(text[at:], self.thinking.open))
        self._emit_text("answer", text[at:end])
        self._emitted_to = end

    def _emit_text(self, kind: Literal["thinking", "answer"], text: str) -> None:
        text = self._held_space + text
        if not self._emitted[kind] and (kind == "thinking" or self._has_thinking):
            text = text.lstrip()
        certain = text.rstrip()
        self._held_space = text[len(certain) :]
        if certain:
            self._emitted[kind] += certain
            self.emit(TextDelta(kind, certain))

    # The complete reply

    def _parse(self, truncated: bool) -> ReadReply:
        self._text, self._truncated, self._has_thinking = self._whole, truncated, self.inside
        if self.thinking is not None:
            begin = 0 if self._has_thinking else skip_whitespace(self._text, 0)
            if self._has_thinking or self._text.startswith(self.thinking.open, begin):
                begin += 0 if self._has_thinking else len(self.thinking.open)
                self._has_thinking, self._open_optional = True, False
                self._advance(self._record_thinking(self.thinking, begin, begin))
        at = 0
        while at < len(self._text):
            mark = self._next_mark(at)
            self._parts.append(self._text[at:mark])
            at = self._parse_mark(mark) if mark < len(self._text) else mark
        thoughts = (self._whole[begin:end].strip() for begin, end in self._spans)
        return ReadReply(self._assemble(), "\n\n".join(filter(None, thoughts)), self._spans)

    def _assemble(self) -> ParsedReply:
        """Return the answer and its calls, which are those of the lowest rank."""
        lowest = min((part[1] for part in self._parts if isinstance(part, tuple)), default=0)
        parsed, called = ParsedReply(""), False
        for part in self._parts:
            if part is None:
                self._has_thinking = True
                continue
            calls, rank, text = part if isinstance(part, tuple) else (None, None, part)
            blank = not parsed.content.strip()
            parsed.content += calls.content if calls is not None and rank == lowest else text
            if blank and (self._has_thinking or called):
                parsed.content = parsed.content.lstrip()
            if calls is not None and rank == lowest:
                parsed.tool_calls += calls.tool_calls
                parsed.invalid_tool_calls += calls.invalid_tool_calls
                called = called or parsed.called
        if called:
            parsed.content = parsed.content.rstrip()
        return parsed

    def _advance(self, length: int) -> None:
        self._text = self._text[length:]
        self._offset += length

    def _next_mark(self, at: int) -> int:
        """Return where a call, code or thinking may begin next; the end of the text if nowhere."""
        text, tags = self._text, self.thinking
        begins = self.parser.begins if self.parser is not None else _NO_MATCH
        found = [match.start() for match in (begins.search(text, at), _FENCE.search(text, at)) if match is not None]
        expected_tags = [] if tags is None else [tags.open, tags.close] if self._open_optional else [tags.open]
        found += [position for tag in expected_tags if (position := text.find(tag, at)) >= 0]
        return min(found, default=len(text))

    def _parse_mark(self, at: int) -> int:
        """Parse the call, code or thinking that may begin at a place; returns the end of the parsed text."""
        text, tags = self._text, self.thinking
        fence = _FENCE.match(text, at)
        if fence is None and (code_end := self._code_end(at)) > at:
            self._parts.append(text[at:code_end])
            self._line_floor = code_end
            return code_end
        if tags is not None and text.startswith(tags.open, at):
            begin = at + len(tags.open)
            if tags.close not in text[begin:] and not self._truncated:
                self._parts.append(tags.open)
                return begin
            self._open_optional = False  # text before an opening tag is part of the answer
            self._parts.append(None)
            self._line_floor = self._record_thinking(tags, skip_whitespace(text, begin), begin)
            return self._line_floor
        if tags is not None and self._open_optional and text.startswith(tags.close, at):
            # An unopened closing tag: all text before it was thinking.
            self._parts.clear()
            self._open_optional, self._has_thinking, self._line_floor = False, True, 0
            self._advance(self._record_thinking(tags, 0, at))
            return 0
        end = at
        if self.parser is not None and self.parser.begins.match(text, at):
            found = self.parser.read(text, at, self.tools, truncated=self._truncated)
            if found.calls is not None:
                self._parts.append((found.calls, found.rank, text[at : found.end]))
                self._line_floor = found.end
                return found.end
            end = found.end
        if end == at:
            end = self._fence_end(fence) if fence is not None else at + 1
        self._parts.append(text[at:end])
        return end

    def _record_thinking(self, tags: ThinkingTags, begin: int, search: int) -> int:
        """Record the thinking from `begin` to the closing tag after `search`; returns where the answer continues."""
        close = self._text.find(tags.close, search)
        end = close if close >= 0 else len(self._text)
        if end > begin:
            self._spans.append((self._offset + begin, self._offset + end))
        return end + len(tags.close) if close >= 0 else end

    def _code_end(self, at: int) -> int:
        """Return the end of the inline code that contains a place, or the place itself if none does."""
        # Closing backticks are on the same line, or in the same paragraph if the opening ones directly precede `at`.
        begin = max(self._text.rfind("\n", 0, at) + 1, self._line_floor)
        opened = ""
        for ticks in _TICKS.findall(self._text, begin, at):
            opened = ticks if not opened else "" if ticks == opened else opened
        if not opened:
            return at
        end = self._text.find("\n\n" if self._text.endswith(opened, 0, at) else "\n", at)
        closing = _TICKS.finditer(self._text, at, end if end >= 0 else len(self._text))
        return next((ticks.end() for ticks in closing if ticks.group() == opened), at)

    def _fence_end(self, fence: re.Match[str]) -> int:
        """Return the end of a code block, or of inline code."""
        begin, ticks = fence.start(), fence.group()
        line_end = self._text.find("\n", fence.end())
        first = not self._text[max(self._text.rfind("\n", 0, begin) + 1, self._line_floor) : begin].strip()
        rest = self._text[fence.end() : line_end]
        if "`" in rest or not (first or re.fullmatch(r"\w*\s*", rest)):
            closing = next((run for run in _TICKS.finditer(rest) if run.group() == ticks), None)
            return fence.end() + (closing.end() if closing is not None else 0)
        if line_end < 0:
            return len(self._text)
        ends = re.compile(rf"^[ \t]*{ticks[0]}{{{len(ticks)},}}[ \t]*(?:\n|\Z)", re.MULTILINE)
        closing = ends.search(self._text, line_end + 1)
        return closing.end() if closing is not None else len(self._text)


def _partial_tag(text: str, tag: str) -> int:
    """Return the length of the text's end that may be the beginning of a tag."""
    longest = min(len(tag) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if tag.startswith(text[-length:])), 0)
