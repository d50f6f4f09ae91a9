"""Splits a stream of tokens into reasoning steps."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.thinking import ThinkingBudget, ThinkingState
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
        thinking = self.thinking.then(text) if self.thinking.tags is not None else self.thinking
        return PrefixContext(self.room, tail, line[begins:], block, thinking)

    def after(self, step: Step) -> "PrefixContext":
        """The context after a step; a block that was open where the thinking was closed ends there."""
        context = self.then(step.text)
        return replace(context, line="", block=None) if step.closing_tokens else context


class Segmenter:
    """Collects the tokens of one step until it ends; `text` decodes them, and the reply has `budget` tokens left.

    Where the budget `thinking` is used up, the step ends with the tokens that `close` returns; without `close`, for a
    draft's step, it is truncated there.
    """

    def __init__(
        self,
        rules: Segmentation,
        text: TextStream,
        before: PrefixContext,
        budget: int,
        thinking: ThinkingBudget | None = None,
        close: Callable[[ThinkingState], Sequence[int]] | None = None,
    ) -> None:
        self._rules = rules
        self._stream = text
        self._before = before.tail
        self._context = before
        self._budget = budget
        self.thinking = thinking
        self._close = close
        self._closing: Sequence[int] = ()
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
        if self.thinking is not None:
            self.thinking = self._count(self.thinking, piece)
            if self.thinking.is_used_up and (end is None or not end.ends_reply):
                end = self._close_thinking(self.thinking)
        return self._step(end) if end is not None else None

    def close(self, reason: str | None) -> Step:
        """End the step where the engine's stream ended, by its finish reason."""
        return self._step(StepEnd.EOS if reason == "stop" else StepEnd.BUDGET)

    def _find_end(self, token_id: int, piece: str, seen: int) -> StepEnd | None:
        rules = self._rules
        if token_id in rules.eos_ids:
            return StepEnd.EOS
        if piece:
            if self._has_stop(seen):
                return StepEnd.STOP
            if len(self.token_ids) < self._budget and (end := self._find_boundary(seen)) is not None:
                return end
        if len(self.token_ids) >= self._budget:
            return StepEnd.BUDGET
        if len(self.token_ids) >= rules.max_step_tokens:
            return StepEnd.LIMIT
        return None

    def _has_stop(self, seen: int) -> bool:
        """Whether the text after the first `seen` characters completes a stop string."""
        text, thinking = self._before + self.text, self._context.thinking
        return any(
            thinking.find(text, stop, max(0, seen - len(stop) + 1), len(self._before)) >= 0 for stop in self._rules.stop
        )

    def _find_boundary(self, seen: int) -> StepEnd | None:
        """The boundary between two steps that the text after the first `seen` characters completes, if any."""
        if any(self._ends_now(marker, seen) for marker in self._rules.action_markers):
            return StepEnd.ACTION
        if self._ends_now(self._rules.thinking_marker, seen):
            return StepEnd.THINKING
        if self._ends_now(self._rules.boundary, seen) or self._is_delimited():
            return StepEnd.DELIMITER
        return None

    def _count(self, before: ThinkingBudget, piece: str) -> ThinkingBudget:
        """The budget of the thinking after the last token; an opening tag in code opens no thinking."""
        after = before.then(piece)
        if before.state.inside or not after.state.inside:
            return after
        assert after.state.tags is not None
        text = self._context.line + self.text
        ahead = text[: max(0, text.rfind(after.state.tags.open))]
        is_code = ahead.rpartition("\n")[2].count("`") % 2 or open_block(ahead, self._context.block)
        return after.outside() if is_code else after

    def _close_thinking(self, thinking: ThinkingBudget) -> StepEnd:
        """Add the tokens that close the thinking, as far as the reply has room, and return the end of the step."""
        if self._close is None:
            return StepEnd.LIMIT
        room, seen = self._budget - len(self.token_ids), len(self._before) + len(self.text)
        self._closing = self._close(thinking.state)[:room]
        piece = "".join(map(self._stream.push, self._closing))
        self.text += piece
        self.thinking = replace(thinking, state=thinking.state.then(piece))
        if self._has_stop(seen):
            return StepEnd.STOP
        return StepEnd.BUDGET if len(self._closing) == room else self._find_boundary(seen) or StepEnd.DELIMITER

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
        return Step((*self.token_ids, *self._closing), self.text, end, self.thinking, len(self._closing))
