"""Reads a reply while it is written: its thinking, its text and its tool calls, for streams and whole replies alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.generation.backend import TextDelta
from lookahead_agent.generation.json_tool_parsers import ToolParser
from lookahead_agent.generation.tool_calls import ParsedReply, Tools, skip_space

_NOWHERE = re.compile(r"(?!)")
_FENCE = re.compile(r"`{3,}|~{3,}")
_HALF_FENCE = re.compile(r"(?:`+|~+)\Z")
_TICKS = re.compile(r"`+")
_NO_RANK = 99


@dataclass
class ReadReply:
    """The content of a reply: the answer, the thinking and its places in the text, and pieces not passed on yet."""

    parsed: ParsedReply = field(default_factory=lambda: ParsedReply(""))
    thinking: str = ""
    thinking_spans: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[TextDelta] = field(default_factory=list)

    def thinking_tokens(self, text_ends: Sequence[int]) -> int:
        """How many tokens the thinking has, by the length of the text after each token, shape (n,)."""
        begins = (0, *text_ends)
        return sum(any(begin <= at < end for begin, end in self.thinking_spans) for at in begins[: len(text_ends)])


@dataclass
class _Call:
    """Calls that were read, and the text that they would be if others were the reply's."""

    calls: ParsedReply
    rank: int
    text: str


@dataclass
class _Passed:
    """Thinking or answer, as it is passed on."""

    text: str = ""
    waiting: str = ""
    """White space that is only part of it if more follows."""


class ReplyReader:
    """Reads one reply. However it is cut into pieces, it reads the same, and the pieces that it emits are all of it.

    - Thinking is the text between the tags: at the reply's beginning, which the prompt may have opened, or later.
      Before a closing tag that nothing opened, all is thinking, if the model thinks before each answer. An opening tag
      without a closing one, past the beginning, is a word of the answer, unless the reply was cut off there.
    - White space around the thinking, before the answer, around calls at its ends, is nobody's.
    - Tags in code (in fences, between backticks) are words of the answer.
    - Calls of the lowest rank are the reply's; see `Found`.

    Args:
        thinking: The tags around the thinking; None: there is none.
        inside: Whether the reply begins inside the thinking.
        after: Whether it begins after the thinking.
        parser: Finds tool calls; None: there are none to find.
        tools: What may be called.
        emit: Given the pieces of thinking and answer as soon as they are certain.
    """

    def __init__(
        self,
        thinking: ThinkingTags | None,
        inside: bool,
        after: bool,
        parser: ToolParser | None,
        tools: Tools,
        emit: Callable[[TextDelta], None],
    ) -> None:
        self._tags = thinking
        self._parser = parser
        self._tools = tools
        self._emit = emit
        self._text = ""
        """The thinking that is not read yet; or the answer from its beginning."""
        self._offset = 0
        """Where that begins in the reply."""
        self._at = 0
        """Up to where the answer is read."""
        self._state = "answer" if thinking is None else "thinking" if inside else "begin"
        self._plain = thinking is None and parser is None
        """Whether all of the reply is its answer, of which nothing has to wait."""
        self._thought = inside
        self._unopened = thinking is not None and thinking.always and not inside and not after
        self._fence: re.Pattern[str] | None = None
        self._no_call_at = -1
        self._ask_at = 0
        """The length of the text from which it is read on."""
        self._line_floor = 0
        self._parts: list[str | _Call | None] = []
        """The answer that is read and not passed on; None means thinking."""
        self._rank = _NO_RANK
        """The lowest of the calls' ranks."""
        self._spans: list[tuple[int, int]] = []
        self._calls = ParsedReply("")
        self._said = {"thinking": _Passed(), "answer": _Passed()}

    def push(self, text: str) -> None:
        """Add text."""
        if self._plain:
            self._say("answer", text, whole=True)
            return
        self._text += text
        self._read(final=False, cut=False)
        self._pass_on(None)

    def finish(self, cut: bool) -> ReadReply:
        """The whole reply; `cut`: the model had more to say, but ran out of tokens or wrote a stop string."""
        pieces: list[TextDelta] = []
        self._emit = pieces.append
        self._read(final=True, cut=cut)
        self._pass_on(self._rank)
        if not (self._calls.tool_calls or self._calls.invalid_tool_calls):
            self._say("answer", "", whole=True)
        self._calls.content = self._said["answer"].text
        return ReadReply(self._calls, self._said["thinking"].text, self._spans, pieces)

    # Reading

    def _read(self, *, final: bool, cut: bool) -> None:
        if self._state == "begin":
            self._begin(final=final)
        if self._state == "thinking":
            self._think(final=final)
        if self._state == "answer" and (final or len(self._text) >= self._ask_at):
            while self._answer(final=final, cut=cut):
                continue

    def _begin(self, *, final: bool) -> None:
        """See whether the reply begins with its thinking."""
        assert self._tags is not None
        begin = skip_space(self._text, 0)
        text = self._text[begin:]
        if self._tags.open.startswith(text) and text != self._tags.open and not final:
            return
        if text.startswith(self._tags.open):
            self._drop(begin + len(self._tags.open))
            self._state, self._thought, self._unopened = "thinking", True, False
        else:
            self._state = "answer"

    def _think(self, *, final: bool) -> None:
        assert self._tags is not None
        close = self._text.find(self._tags.close)
        end = close if close >= 0 else len(self._text) - (0 if final else _half(self._text, self._tags.close))
        self._add_thinking(0, end)
        self._drop(end + len(self._tags.close) if close >= 0 else end)
        if close >= 0:
            self._state = "answer"
            self._said["thinking"].waiting = ""

    def _add_thinking(self, begin: int, end: int) -> None:
        if end > begin:
            before = self._spans.pop() if self._spans and self._spans[-1][1] == self._offset + begin else None
            self._spans.append((before[0] if before else self._offset + begin, self._offset + end))
            self._say("thinking", self._text[begin:end])

    def _drop(self, length: int) -> None:
        self._text = self._text[length:]
        self._offset += length

    def _answer(self, *, final: bool, cut: bool) -> bool:
        """Read on; False: more text is needed, or there is no more."""
        if self._at >= len(self._text):
            return False
        if self._fence is not None:
            return self._in_fence(self._fence, final=final)
        text, at, tags = self._text, self._at, self._awaited_tags()
        calls = self._parser.begins if self._parser is not None else _NOWHERE
        begin = at + 1 if at == self._no_call_at else at
        found = [match.start() for match in (calls.search(text, begin), _FENCE.search(text, at)) if match is not None]
        found += [place for tag in tags if (place := text.find(tag, at)) >= 0]
        end = len(text)
        if not final:
            half = [_HALF_FENCE.search(text, at)] + (
                [self._parser.may_begin.search(text, at)] if self._parser is not None else []
            )
            end = min([end, *(match.start() for match in half if match is not None)])
            end = min([end, *(len(text) - _half(text[at:], tag) for tag in tags)])
        if not found or min(found) > end:
            self._add_text(end)
            return False
        self._add_text(min(found))
        if self._at_mark(final=final, cut=cut):
            return True
        # A long call is not read anew for each of its tokens.
        self._ask_at = len(text) + (len(text) - self._at) // 16
        return False

    def _awaited_tags(self) -> list[str]:
        if self._tags is None:
            return []
        return [self._tags.open, self._tags.close] if self._unopened else [self._tags.open]

    def _add_text(self, end: int) -> None:
        if end > self._at:
            self._parts.append(self._text[self._at : end])
            self._at = end

    def _at_mark(self, *, final: bool, cut: bool) -> bool:
        """Read on where a call, a code block or thinking may begin."""
        text, at = self._text, self._at
        fence = _FENCE.match(text, at)
        if fence is None:
            code_end = self._code_end(at, final=final)
            if code_end is None:
                return False
            if code_end > at:
                self._add_text(code_end)
                self._line_floor = code_end
                return True
        if self._tags is not None:
            if text.startswith(self._tags.open, at):
                return self._think_again(self._tags, final=final, cut=cut)
            if self._unopened and text.startswith(self._tags.close, at):
                self._was_thinking(self._tags)
                return True
        if not final and any(tag.startswith(text[at:]) for tag in self._awaited_tags()):
            return False
        if self._parser is not None:
            if at != self._no_call_at and self._parser.begins.match(text, at):
                found = self._parser.read(text, at, self._tools, final=final, cut=cut)
                if found is None:
                    return False
                if found.calls is not None:
                    self._parts.append(_Call(found.calls, found.rank, text[at : found.end]))
                    self._rank = min(self._rank, found.rank)
                    self._at = self._line_floor = found.end
                    return True
                if found.end > at:
                    self._add_text(found.end)
                    return True
                self._no_call_at = at
                if fence is None:
                    return True
            elif fence is not None and not final and self._parser.may_begin.match(text, at):
                return False
        assert fence is not None
        return self._begin_fence(fence, final=final)

    def _code_end(self, at: int, *, final: bool) -> int | None:
        """Where the code between backticks ends that a place is in; the place itself: in none; None: not known yet.

        Those that end it are in the same line, or, of backticks right before the place, in the same paragraph.
        """
        begin = max(self._text.rfind("\n", 0, at) + 1, self._line_floor)
        opened = ""
        for ticks in _TICKS.findall(self._text, begin, at):
            opened = ticks if not opened else "" if ticks == opened else opened
        if not opened:
            return at
        end = self._text.find("\n\n" if self._text.endswith(opened, 0, at) else "\n", at)
        known = end >= 0 or final
        for ticks in _TICKS.finditer(self._text, at, end if end >= 0 else len(self._text)):
            if ticks.group() == opened and (known or ticks.end() < len(self._text)):
                return ticks.end()
        return at if known else None

    def _begin_fence(self, fence: re.Match[str], *, final: bool) -> bool:
        """Read the first line of a code block."""
        begin, ticks = fence.start(), fence.group()
        line_end = self._text.find("\n", fence.end())
        first = not self._text[max(self._text.rfind("\n", 0, begin) + 1, self._line_floor) : begin].strip()
        if line_end < 0 and not final:
            return False
        line_end = line_end if line_end >= 0 else len(self._text) - 1
        rest = self._text[fence.end() : line_end]
        if "`" in rest or not (first or re.fullmatch(r"\w*\s*", rest)):
            # Code within a line, which may be closed there.
            closing = next((run for run in _TICKS.finditer(rest) if run.group() == ticks), None)
            self._add_text(fence.end() + (closing.end() if closing is not None else 0))
            return True
        self._fence = re.compile(rf"[ \t]*{ticks[0]}{{{len(ticks)},}}[ \t]*(?:\n|\Z)")
        self._add_text(line_end + 1)
        return True

    def _in_fence(self, ends: re.Pattern[str], *, final: bool) -> bool:
        """Read a line of a code block, the last one too."""
        line_end = self._text.find("\n", self._at)
        if line_end < 0 and not final:
            return False
        if ends.match(self._text, self._at):
            self._fence = None
        self._add_text(line_end + 1 if line_end >= 0 else len(self._text))
        return True

    def _think_again(self, tags: ThinkingTags, *, final: bool, cut: bool) -> bool:
        """Read thinking in the middle of the answer."""
        at = self._at
        begin = at + len(tags.open)
        close = self._text.find(tags.close, begin)
        if close < 0 and not final:
            return False
        if close < 0 and not cut:
            self._add_text(begin)
            return True
        self._unopened = False  # what stands before a tag that opens it is answer
        end = close if close >= 0 else len(self._text)
        if self._said["thinking"].text:
            self._say("thinking", "\n\n")
        self._add_thinking(skip_space(self._text, begin), end)
        self._said["thinking"].waiting = ""
        self._parts.append(None)
        self._at = self._line_floor = end + len(tags.close) if close >= 0 else end
        return True

    def _was_thinking(self, tags: ThinkingTags) -> None:
        """All before a closing tag that nothing opened was thinking."""
        self._add_thinking(0, self._at)
        self._said["thinking"].waiting = ""
        self._parts.clear()
        self._rank = _NO_RANK
        self._drop(self._at + len(tags.close))
        self._at = self._line_floor = 0
        self._no_call_at, self._ask_at, self._fence = -1, 0, None
        self._unopened, self._thought = False, True

    # Passing on

    def _pass_on(self, rank: int | None) -> None:
        """Pass on the part of the answer that is certain; `rank` is that of the reply's calls, None: not known yet."""
        if self._unopened and rank is None:
            return
        while self._parts:
            part = self._parts[0]
            if isinstance(part, _Call) and rank is None and part.rank:
                return
            self._parts.pop(0)
            if part is None:
                self._thought = True
            elif isinstance(part, str):
                self._say("answer", part)
            elif rank not in (None, part.rank):
                self._say("answer", part.text)
            else:
                self._say("answer", part.calls.content)
                self._calls.extend(part.calls)
                if not self._said["answer"].text:
                    self._said["answer"].waiting = ""

    def _say(self, kind: str, text: str, *, whole: bool = False) -> None:
        passed = self._said[kind]
        text = passed.waiting + text
        called = bool(self._calls.tool_calls or self._calls.invalid_tool_calls)
        if not passed.text and (kind == "thinking" or self._thought or called):
            text = text.lstrip()
        certain = text if whole else text.rstrip()
        passed.waiting = text[len(certain) :]
        if certain:
            passed.text += certain
            self._emit(TextDelta("thinking" if kind == "thinking" else "answer", certain))


def _half(text: str, tag: str) -> int:
    """Length of the text's end that may be the beginning of a tag."""
    longest = min(len(tag) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if tag.startswith(text[-length:])), 0)
