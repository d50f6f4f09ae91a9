"""Splits a stream of tokens into reasoning steps."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.tokenizer import TextStream
from lookahead_agent.system.delimiters import delimiter_finder, too_slow

# Blocks in which no delimiter counts, since they may contain blank lines: fenced code and LaTeX displays.
_MARKS = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})|(?P<display>\\\[|\\\]|\$\$)|\\(?P<side>begin|end)\{(?P<name>\w+\*?)\}", re.MULTILINE
)
_CLOSES = {"\\[": "\\]", "$$": "$$"}


@dataclass(frozen=True)
class Segmentation:
    """The rules that end a step. The delimiter counts only after other text, outside code and LaTeX blocks."""

    delimiter: str | re.Pattern[str] | None = "\n\n"  # None: no text ends a step
    max_step_tokens: int = 256
    step_tokens: int | None = None  # fixed step length, within the reply's budget; None: text ends steps
    action_markers: tuple[str, ...] = ()  # texts that open an action region
    thinking_marker: str | None = None  # tag that opens the thinking, while the reply waits for it
    boundary: str | None = None  # text that ends a step anywhere, such as the tag that closes the thinking
    stop: tuple[str, ...] = ()  # the request's stop strings
    eos_ids: Collection[int] = ()  # tokens that end the reply


def open_block(text: str, inside: str | None = None) -> str | None:
    """The mark that closes the block open at the end of a text, or None; `inside` is the mark at its beginning."""
    for match in _MARKS.finditer(text):
        fence, display, side, name = match["fence"], match["display"], match["side"], match["name"]
        if inside is not None:
            if inside in (fence, display) or (side == "end" and inside == name):
                inside = None
        elif fence:
            inside = fence
        elif display in _CLOSES:
            inside = _CLOSES[display]
        elif side == "begin":
            inside = name
    return inside


@dataclass(frozen=True)
class ThinkingState:
    """Whether a position in a reply is inside its thinking, where stop strings do not count."""

    tags: ThinkingTags | None = None  # None: the model marks no thinking
    inside: bool = False
    tail: str = ""  # the text before the position in which the next tag may begin

    def then(self, text: str) -> "ThinkingState":
        """The state after more text."""
        return self._walk(text)[1] if self.tags is not None else self

    def find(self, text: str, stop: str, at: int = 0, before: int = 0) -> int:
        """The index of a stop string in the answer, from `at` on; -1: there is none.

        This state holds after the first `before` characters of the text.
        """
        while (at := text.find(stop, at)) >= 0:
            if self.is_answer(text[before:], max(0, at - before), at + len(stop) - before):
                return at
            at += 1
        return -1

    def is_answer(self, text: str, begin: int, end: int) -> bool:
        """Whether a span of the text that follows lies in the answer; the tags count as answer."""
        if self.tags is None:
            return True
        return any(start <= begin and end <= stop for start, stop in self._walk(text)[0])

    def _walk(self, text: str) -> tuple[list[tuple[int, int]], "ThinkingState"]:
        """The spans of the answer in the text that follows, and the state after it."""
        assert self.tags is not None
        whole, inside, at = self.tail + text, self.inside, 0
        before = len(self.tail)
        spans: list[tuple[int, int]] = []
        begin = 0
        while (place := whole.find(self._next_tag(inside), at)) >= 0:
            at = place + len(self._next_tag(inside))
            if inside:
                begin = place
            else:
                spans.append((max(0, begin - before), at - before))
            inside = not inside
        if not inside:
            spans.append((max(0, begin - before), len(text)))
        kept = len(self._next_tag(inside)) - 1
        return spans, ThinkingState(self.tags, inside, whole[max(at, len(whole) - kept) :] if kept else "")

    def _next_tag(self, inside: bool) -> str:
        assert self.tags is not None
        return self.tags.close if inside else self.tags.open


@dataclass(frozen=True)
class PrefixContext:
    """The part of the reply before a step that decides where the step ends, however long the reply is."""

    room: int = 0  # characters before the step in which a marker or stop string may begin
    tail: str = ""  # the reply's last `room` characters
    line: str = ""  # the reply's last line: a step's end may split a block mark
    block: str | None = None  # mark that closes the block open at the beginning of the line
    thinking: ThinkingState = field(default_factory=ThinkingState)

    def then(self, text: str) -> "PrefixContext":
        """The context after more text."""
        line = self.line + text
        begins = line.rfind("\n") + 1
        tail = (self.tail + text)[-self.room :] if self.room else ""
        block = open_block(line[:begins], self.block)
        return PrefixContext(self.room, tail, line[begins:], block, self.thinking.then(text))


class Segmenter:
    """Collects the tokens of one step until it ends; `text` decodes them, and the reply has `budget` tokens left."""

    def __init__(self, rules: Segmentation, text: TextStream, before: PrefixContext, budget: int) -> None:
        self._rules = rules
        self._stream = text
        self._before = before.tail
        self._context = before
        self._budget = budget
        self.token_ids: list[int] = []
        self.text = ""
        self._delimited_from = 0  # index from which a delimiter may be found

    def push(self, token_id: int) -> Step | None:
        """Add one token and return the step if the token ends it."""
        self.token_ids.append(token_id)
        piece = self._stream.push(token_id)
        seen = len(self._before) + len(self.text)
        self.text += piece
        end = self._find_end(token_id, piece, seen)
        return self._step(end) if end is not None else None

    def close(self, reason: str | None) -> Step:
        """End the step where the engine's stream ended, by its finish reason."""
        return self._step(StepEnd.EOS if reason == "stop" else StepEnd.BUDGET)

    def _find_end(self, token_id: int, piece: str, seen: int) -> StepEnd | None:
        rules = self._rules
        if rules.step_tokens is not None:
            if len(self.token_ids) >= self._budget:
                return StepEnd.BUDGET
            return StepEnd.DELIMITER if len(self.token_ids) >= rules.step_tokens else None
        if token_id in rules.eos_ids:
            return StepEnd.EOS
        if piece:
            text, thinking = self._before + self.text, self._context.thinking
            for stop in rules.stop:
                if thinking.find(text, stop, max(0, seen - len(stop) + 1), len(self._before)) >= 0:
                    return StepEnd.STOP
            if len(self.token_ids) < self._budget:
                if any(self._ends_now(marker, seen) for marker in rules.action_markers):
                    return StepEnd.ACTION
                if self._ends_now(rules.thinking_marker, seen):
                    return StepEnd.THINKING
                if self._ends_now(rules.boundary, seen) or self._is_delimited():
                    return StepEnd.DELIMITER
        if len(self.token_ids) >= self._budget:
            return StepEnd.BUDGET
        if len(self.token_ids) >= rules.max_step_tokens:
            return StepEnd.LIMIT
        return None

    def _ends_now(self, marker: str | None, seen: int) -> bool:
        """Whether the last token completed a marker; the text had `seen` characters before it."""
        return marker is not None and (self._before + self.text).find(marker, max(0, seen - len(marker) + 1)) >= 0

    def _is_delimited(self) -> bool:
        delimiter = self._rules.delimiter
        if delimiter is None:
            return False
        begins = len(self.text) - len(self.text.lstrip())
        try:
            for match in delimiter_finder(delimiter)(self.text, max(begins, self._delimited_from)):
                if open_block(self._context.line + self.text[: match.start()], self._context.block) is None:
                    return True
                self._delimited_from = match.end()
        except TimeoutError:
            raise too_slow(delimiter) from None
        return False

    def _step(self, end: StepEnd) -> Step:
        return Step(tuple(self.token_ids), self.text, end)
