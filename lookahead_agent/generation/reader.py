"""Reads a reply: its thinking, its text and its tool calls, for streams and whole replies alike."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.generation.backend import TextDelta
from lookahead_agent.generation.json_tool_parsers import ToolParser
from lookahead_agent.generation.tool_calls import ParsedReply, Tools, skip_space

_NOWHERE = re.compile(r"(?!)")
_FENCE = re.compile(r"`{3,}|~{3,}")
_TICKS = re.compile(r"`+")


@dataclass
class ReadReply:
    """The content of a reply: the answer, the thinking and its places in the text, and text not passed on yet."""

    parsed: ParsedReply = field(default_factory=lambda: ParsedReply(""))
    thinking: str = ""
    thinking_spans: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[TextDelta] = field(default_factory=list)

    def thinking_tokens(self, text_ends: Sequence[int]) -> int:
        """How many tokens the thinking has, by the length of the text after each token, shape (n,)."""
        begins = (0, *text_ends)
        return sum(any(begin <= at < end for begin, end in self.thinking_spans) for at in begins[: len(text_ends)])


@dataclass(eq=False)
class ReplyReader:
    """Reads one reply: passes on what is certain while it is written, and reads the whole at its end."""

    # Thinking is the text between the tags, or before a closing one that nothing opened if the model always thinks.
    # White space around thinking and calls is nobody's, tags in code are words, and calls of the lowest rank count.

    thinking: ThinkingTags | None
    inside: bool  # whether the reply begins in its thinking
    after: bool  # or after it
    parser: ToolParser | None
    tools: Tools
    emit: Callable[[TextDelta], None]

    def __post_init__(self) -> None:
        self._thought = self.inside
        self._unopened = self.thinking is not None and self.thinking.always and not self.inside and not self.after
        self._whole = ""
        self._text = ""  # what is not passed on of the thinking; or the answer from its beginning
        self._at = 0  # up to where the answer is passed on
        self._state = "answer" if self.thinking is None else "thinking" if self.inside else "begin"
        self._passed = {"thinking": "", "answer": ""}
        self._waiting = ""  # white space that is only part of the text if more follows
        self._cut = False
        self._offset = 0  # where the answer is in the reply
        self._floor = 0  # where the line may begin at the earliest: after a call, thinking or code in it
        self._spans: list[tuple[int, int]] = []
        # The answer; calls have the text that they would be if others were the reply's, and None means thinking.
        self._parts: list[str | tuple[ParsedReply, int, str] | None] = []

    def push(self, text: str) -> None:
        """Add text."""
        self._whole += text
        if self.thinking is None and self.parser is None:
            self._passed["answer"] += text
            self.emit(TextDelta("answer", text))
            return
        self._text += text
        if self._state == "begin":
            self._begin()
        if self._state == "thinking":
            self._think()
        if self._state == "answer":
            self._answer()

    def finish(self, cut: bool) -> ReadReply:
        """The whole reply; `cut`: the model had more to say, but ran out of tokens or wrote a stop string."""
        reply = self._read(cut)
        rest = (
            TextDelta("thinking", reply.thinking[len(self._passed["thinking"]) :]),
            TextDelta("answer", reply.parsed.content[len(self._passed["answer"]) :]),
        )
        reply.pieces = [piece for piece in rest if piece.text]
        return reply

    def _begin(self) -> None:
        assert self.thinking is not None
        text = self._text.lstrip()
        if text.startswith(self.thinking.open):
            self._text, self._state, self._thought = text[len(self.thinking.open) :], "thinking", True
        elif not self.thinking.open.startswith(text):
            self._state = "held" if self._unopened else "answer"

    def _think(self) -> None:
        assert self.thinking is not None
        close = self._text.find(self.thinking.close)
        end = close if close >= 0 else len(self._text) - _half(self._text, self.thinking.close)
        self._pass_on("thinking", self._text[:end])
        self._text = self._text[end:]
        if close >= 0:
            self._text, self._state, self._waiting = self._text[len(self.thinking.close) :], "answer", ""

    def _answer(self) -> None:
        """Pass on the text before the first place where a call or thinking may begin."""
        text, at, end = self._text, self._at, len(self._text)
        found = self.parser.begins.search(text, at) if self.parser is not None else None
        begins = [found.start()] if found is not None else []
        if self.thinking is not None and (opened := text.find(self.thinking.open, at)) >= 0:
            begins.append(opened)
        if begins:
            end, self._state = min(begins), "held"
        else:
            if self.parser is not None and (half := self.parser.may_begin.search(text, at)) is not None:
                end = half.start()
            if self.thinking is not None:
                end = min(end, len(text) - _half(text[at:], self.thinking.open))
        self._pass_on("answer", text[at:end])
        self._at = end

    def _pass_on(self, kind: Literal["thinking", "answer"], text: str) -> None:
        text = self._waiting + text
        if not self._passed[kind] and (kind == "thinking" or self._thought):
            text = text.lstrip()
        certain = text.rstrip()
        self._waiting = text[len(certain) :]
        if certain:
            self._passed[kind] += certain
            self.emit(TextDelta(kind, certain))

    # The whole

    def _read(self, cut: bool) -> ReadReply:
        self._text, self._cut, self._thought = self._whole, cut, self.inside
        if self.thinking is not None:
            begin = 0 if self._thought else skip_space(self._text, 0)
            if self._thought or self._text.startswith(self.thinking.open, begin):
                begin += 0 if self._thought else len(self.thinking.open)
                self._thought, self._unopened = True, False
                self._drop(self._note_thinking(self.thinking, begin, begin))
        at = 0
        while at < len(self._text):
            mark = self._next_mark(at)
            self._parts.append(self._text[at:mark])
            at = self._read_mark(mark) if mark < len(self._text) else mark
        thoughts = (self._whole[begin:end].strip() for begin, end in self._spans)
        return ReadReply(self._parsed(), "\n\n".join(filter(None, thoughts)), self._spans)

    def _parsed(self) -> ParsedReply:
        """The answer without the calls, which are those of the lowest rank."""
        least = min((part[1] for part in self._parts if isinstance(part, tuple)), default=0)
        parsed, called = ParsedReply(""), False
        for part in self._parts:
            if part is None:
                self._thought = True
                continue
            calls, rank, text = part if isinstance(part, tuple) else (None, None, part)
            blank = not parsed.content.strip()
            parsed.content += calls.content if calls is not None and rank == least else text
            if blank and (self._thought or called):
                parsed.content = parsed.content.lstrip()
            if calls is not None and rank == least:
                parsed.tool_calls += calls.tool_calls
                parsed.invalid_tool_calls += calls.invalid_tool_calls
                called = called or parsed.called
        if called:
            parsed.content = parsed.content.rstrip()
        return parsed

    def _drop(self, length: int) -> None:
        self._text = self._text[length:]
        self._offset += length

    def _next_mark(self, at: int) -> int:
        """Where a call, a code block or thinking may begin next; the text's end, if nowhere."""
        text, tags = self._text, self.thinking
        begins = self.parser.begins if self.parser is not None else _NOWHERE
        found = [match.start() for match in (begins.search(text, at), _FENCE.search(text, at)) if match is not None]
        awaited = [] if tags is None else [tags.open, tags.close] if self._unopened else [tags.open]
        found += [place for tag in awaited if (place := text.find(tag, at)) >= 0]
        return min(found, default=len(text))

    def _read_mark(self, at: int) -> int:
        """Read on where a call, a code block or thinking may begin; returns up to where that was read."""
        text, tags = self._text, self.thinking
        fence = _FENCE.match(text, at)
        if fence is None and (code_end := self._code_end(at)) > at:
            self._parts.append(text[at:code_end])
            self._floor = code_end
            return code_end
        if tags is not None and text.startswith(tags.open, at):
            begin = at + len(tags.open)
            if tags.close not in text[begin:] and not self._cut:
                self._parts.append(tags.open)
                return begin
            self._unopened = False  # what stands before a tag that opens it is answer
            self._parts.append(None)
            self._floor = self._note_thinking(tags, skip_space(text, begin), begin)
            return self._floor
        if tags is not None and self._unopened and text.startswith(tags.close, at):
            # All before a closing tag that nothing opened was thinking.
            self._parts.clear()
            self._unopened, self._thought, self._floor = False, True, 0
            self._drop(self._note_thinking(tags, 0, at))
            return 0
        end = at
        if self.parser is not None and self.parser.begins.match(text, at):
            found = self.parser.read(text, at, self.tools, cut=self._cut)
            if found.calls is not None:
                self._parts.append((found.calls, found.rank, text[at : found.end]))
                self._floor = found.end
                return found.end
            end = found.end
        if end == at:
            end = self._fence_end(fence) if fence is not None else at + 1
        self._parts.append(text[at:end])
        return end

    def _note_thinking(self, tags: ThinkingTags, begin: int, search: int) -> int:
        """Note the thinking that begins there and is closed from `search` on; returns where the answer goes on."""
        close = self._text.find(tags.close, search)
        end = close if close >= 0 else len(self._text)
        if end > begin:
            self._spans.append((self._offset + begin, self._offset + end))
        return end + len(tags.close) if close >= 0 else end

    def _code_end(self, at: int) -> int:
        """Where the code between backticks ends that a place is in; the place itself, if it is in none."""
        # Those that end it are in the same line, or, of backticks right before the place, in the same paragraph.
        begin = max(self._text.rfind("\n", 0, at) + 1, self._floor)
        opened = ""
        for ticks in _TICKS.findall(self._text, begin, at):
            opened = ticks if not opened else "" if ticks == opened else opened
        if not opened:
            return at
        end = self._text.find("\n\n" if self._text.endswith(opened, 0, at) else "\n", at)
        closing = _TICKS.finditer(self._text, at, end if end >= 0 else len(self._text))
        return next((ticks.end() for ticks in closing if ticks.group() == opened), at)

    def _fence_end(self, fence: re.Match[str]) -> int:
        """Where a code block ends, or code within a line."""
        begin, ticks = fence.start(), fence.group()
        line_end = self._text.find("\n", fence.end())
        first = not self._text[max(self._text.rfind("\n", 0, begin) + 1, self._floor) : begin].strip()
        rest = self._text[fence.end() : line_end]
        if "`" in rest or not (first or re.fullmatch(r"\w*\s*", rest)):
            closing = next((run for run in _TICKS.finditer(rest) if run.group() == ticks), None)
            return fence.end() + (closing.end() if closing is not None else 0)
        if line_end < 0:
            return len(self._text)
        ends = re.compile(rf"^[ \t]*{ticks[0]}{{{len(ticks)},}}[ \t]*(?:\n|\Z)", re.MULTILINE)
        closing = ends.search(self._text, line_end + 1)
        return closing.end() if closing is not None else len(self._text)


def _half(text: str, tag: str) -> int:
    """Length of the text's end that may be the beginning of a tag."""
    longest = min(len(tag) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if tag.startswith(text[-length:])), 0)
