"""Parses a reply into thinking, answer and tool calls, for streams and complete replies alike."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lookahead_agent.decoding.thinking import partial_tag
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.generation.backend import TextDelta
from lookahead_agent.generation.json_tool_parsers import ToolParser, invalid
from lookahead_agent.generation.scanned_text import ScannedText
from lookahead_agent.generation.tool_calls import (
    MAX_CALLS,
    TOO_MANY_CALLS,
    ParsedReply,
    Tools,
    find_name,
    skip_whitespace,
)

_FENCE = re.compile(r"`{3,}|~{3,}")
_LANGUAGE = re.compile(r"\w*+\s*+")
_MAX_HELD = 128
"""Characters that may begin a call or a tag, from which a stream waits for as many more before it looks again."""


@dataclass
class ReadReply:
    """A parsed reply: answer and calls, the thinking with its spans in the text, and text that is not emitted yet."""

    parsed: ParsedReply = field(default_factory=lambda: ParsedReply(""))
    thinking: str = ""
    thinking_spans: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[TextDelta] = field(default_factory=list)

    def thinking_tokens(self, text_ends: Sequence[int]) -> int:
        """Count the tokens of the thinking, given the length of the text after each token, shape (n,)."""
        begins = (0, *text_ends)[: len(text_ends)]
        return sum(bisect_left(begins, end) - bisect_left(begins, begin) for begin, end in self.thinking_spans)


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
        self._pieces: list[str] = []
        self._space: list[str] = []  # white space at the beginning, before it is known whether thinking follows
        # Thinking that is not emitted yet, or the answer from `_emitted_to` on, after the character before it
        self._text = ""
        self._emitted_to = 0
        self._look_at = 0  # length of the held text from which it is searched again
        self._state = "answer" if self.thinking is None else "thinking" if self.inside else "begin"
        self._emitted = {"thinking": 0, "answer": 0}  # numbers of characters
        self._held_space: list[str] = []  # white space that is emitted only if more text follows
        self._truncated = False
        self._scanned: ScannedText  # the answer of a complete reply
        self._offset = 0  # position of the answer in the reply
        self._line_floor = 0  # earliest start of the line: the end of the last call, thinking or code in it
        self._open_code = (0, 0, 0)  # a beginning of a line, the runs of backticks before it and after, the open run
        self._spans: list[tuple[int, int]] = []
        # Text; calls, with their rank and the text that replaces them if they do not count; None for thinking
        self._calls = Counter[int]()  # numbers of calls, by rank
        self._parts: list[str | tuple[ParsedReply, int, str] | None] = []

    def push(self, text: str) -> None:
        """Add generated text, and emit what is certain."""
        self._pieces.append(text)
        if self.thinking is None and self.parser is None:
            self._emitted["answer"] += len(text)
            self.emit(TextDelta("answer", text))
            return
        if self._state == "held":
            return
        if self._state == "begin" and not self._text and not text.strip():
            self._space.append(text)
            return
        if self._space:
            text = "".join([*self._space, text])
            self._space.clear()
        self._text += text
        if self._state == "begin":
            self._push_begin()
        if self._state == "thinking":
            self._push_thinking()
        if self._state == "answer":
            self._push_answer()

    def finish(self, truncated: bool) -> ReadReply:
        """Parse the whole reply; `truncated`: the token limit or a stop string cut it off."""
        whole = "".join(self._pieces)
        if self.thinking is None and self.parser is None:
            return ReadReply(ParsedReply(whole))
        reply = self._parse(whole, truncated)
        rest = (
            TextDelta("thinking", reply.thinking[self._emitted["thinking"] :]),
            TextDelta("answer", reply.parsed.content[self._emitted["answer"] :]),
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
        end = close if close >= 0 else len(self._text) - partial_tag(self._text, self.thinking.close)
        self._emit_text("thinking", self._text[:end])
        self._text = self._text[end:]
        if close >= 0:
            self._text, self._state = self._text[len(self.thinking.close) :], "answer"
            self._held_space.clear()

    def _push_answer(self) -> None:
        """Emit the text before the first place where a call or thinking may begin."""
        text, at, end = self._text, self._emitted_to, len(self._text)
        if end < self._look_at:
            return
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
                end = min(end, len(text) - partial_tag(text[at:], self.thinking.open))
        self._emit_text("answer", text[at:end])
        # Patterns look at the character before a place, and whether there is one.
        self._emitted_to = min(end, 1)
        self._text = text[end - self._emitted_to :]
        held = len(text) - end
        self._look_at = self._emitted_to + 2 * held if held > _MAX_HELD else 0

    def _emit_text(self, kind: Literal["thinking", "answer"], text: str) -> None:
        if not text.strip():
            self._held_space.append(text)
            return
        text = "".join([*self._held_space, text])
        if not self._emitted[kind] and (kind == "thinking" or self._has_thinking):
            text = text.lstrip()
        certain = text.rstrip()
        self._held_space = [text[len(certain) :]]
        self._emitted[kind] += len(certain)
        self.emit(TextDelta(kind, certain))

    # The complete reply

    def _parse(self, whole: str, truncated: bool) -> ReadReply:
        self._scanned, self._truncated, self._has_thinking = ScannedText(whole), truncated, self.inside
        if self.thinking is not None:
            begin = 0 if self._has_thinking else skip_whitespace(whole, 0)
            if self._has_thinking or whole.startswith(self.thinking.open, begin):
                begin += 0 if self._has_thinking else len(self.thinking.open)
                self._has_thinking, self._open_optional = True, False
                self._advance(self._record_thinking(self.thinking, begin, begin))
        at, marks = 0, self._marks()
        while at < len(self._scanned.text):
            found, text = marks.search(self._scanned.text, at), self._scanned.text
            if found is None:
                self._parts.append(text[at:])
                break
            self._parts.append(text[at : found.start()])
            was_optional = self._open_optional
            at = self._parse_special(found.start())
            if self._open_optional != was_optional:
                marks = self._marks()
        thoughts = (whole[begin:end].strip() for begin, end in self._spans)
        return ReadReply(self._assemble(), "\n\n".join(filter(None, thoughts)), self._spans)

    def _marks(self) -> re.Pattern[str]:
        """Return the pattern of places where a call, code or thinking may begin."""
        patterns = [_FENCE.pattern] if self.parser is None else [self.parser.begins.pattern, _FENCE.pattern]
        if self.thinking is not None:
            patterns += map(re.escape, [self.thinking.open, self.thinking.close][: 1 + self._open_optional])
        return re.compile("|".join(patterns))

    def _assemble(self) -> ParsedReply:
        """Return the answer and its calls, which are those of the lowest rank."""
        lowest = min((part[1] for part in self._parts if isinstance(part, tuple)), default=0)
        parsed, texts = ParsedReply(""), list[str]()
        blank = True  # whether the answer so far is white space
        for part in self._parts:
            if part is None:
                self._has_thinking = True
                continue
            calls, rank, text = part if isinstance(part, tuple) else (None, None, part)
            texts.append(calls.content if calls is not None and rank == lowest else text)
            if blank and (self._has_thinking or parsed.count):
                texts = [texts[-1].lstrip()]
            blank = blank and not texts[-1].strip()
            if calls is not None and rank == lowest:
                parsed.tool_calls += calls.tool_calls
                parsed.invalid_tool_calls += calls.invalid_tool_calls
        parsed.content = "".join(texts)
        if parsed.count:
            parsed.content = parsed.content.rstrip()
        return parsed

    def _advance(self, length: int) -> None:
        self._scanned = ScannedText(self._scanned.text[length:])
        self._open_code = (0, 0, 0)
        self._offset += length

    def _parse_special(self, at: int) -> int:
        """Parse the call, code or thinking that may begin at a place; returns the end of the parsed text."""
        text, tags = self._scanned.text, self.thinking
        fence = _FENCE.match(text, at)
        if fence is None and (code_end := self._code_end(at)) > at:
            self._parts.append(text[at:code_end])
            self._line_floor = code_end
            return code_end
        if tags is not None and text.startswith(tags.open, at):
            begin = at + len(tags.open)
            if self._scanned.find(tags.close, begin) == len(text) and not self._truncated:
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
            found = self.parser.read(self._scanned, at, self.tools, truncated=self._truncated)
            if found.calls is not None:
                if self._calls[found.rank] >= MAX_CALLS:
                    rest = text[at:]
                    found = invalid(find_name(rest), rest, len(text), TOO_MANY_CALLS, rank=found.rank)
                assert found.calls is not None
                self._calls[found.rank] += found.calls.count
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
        end = self._scanned.find(tags.close, search)
        if end > begin:
            self._spans.append((self._offset + begin, self._offset + end))
        return min(end + len(tags.close), len(self._scanned.text))

    def _code_end(self, at: int) -> int:
        """Return the end of the inline code that contains a place, or the place itself if none does."""
        # Closing backticks are on the same line, or in the same paragraph if the opening ones directly precede `at`.
        scanned = self._scanned
        if not scanned.ticks:
            return at
        opened = self._open_ticks(max(scanned.line_begin(at), self._line_floor), at)
        if not opened:
            return at
        end = scanned.find("\n\n" if scanned.text.endswith("`" * opened, 0, at) else "\n", at)
        return scanned.ticks_end(opened, at, end) or at

    def _open_ticks(self, begin: int, at: int) -> int:
        """Return the number of backticks that open the inline code at a place of the line that begins at `begin`."""
        ticks = self._scanned.ticks
        known_begin, index, opened = self._open_code
        if begin != known_begin or index == 0:
            index, opened = bisect_left(ticks, (begin, 0)), 0
        for first, last in ticks[index : bisect_left(ticks, (at, 0), index)]:
            opened = last - first if not opened else 0 if last - first == opened else opened
            index += 1
        self._open_code = (begin, index, opened)
        return opened

    def _fence_end(self, fence: re.Match[str]) -> int:
        """Return the end of a code block, or of inline code."""
        scanned, begin, end = self._scanned, fence.start(), fence.end()
        text, ticks = scanned.text, fence.group()
        line_end = scanned.find("\n", end)
        is_first = scanned.is_blank(max(scanned.line_begin(begin), self._line_floor), begin)
        language = _LANGUAGE.match(text, end, line_end)
        is_language = language is not None and language.end() == line_end
        if scanned.find("`", end) < line_end or not (is_first or is_language):
            return (scanned.ticks_end(len(ticks), end, line_end) if ticks[0] == "`" else None) or end
        if line_end == len(text):
            return len(text)
        ends = re.compile(rf"^[ \t]*+{ticks[0]}{{{len(ticks)},}}+[ \t]*+(?:\n|\Z)", re.MULTILINE)
        closing = ends.search(text, line_end + 1)
        return closing.end() if closing is not None else len(text)
