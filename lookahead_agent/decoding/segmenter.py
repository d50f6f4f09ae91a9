"""Cuts a stream of tokens into reasoning steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lookahead_agent.engines.tokenizer import TextStream
from lookahead_agent.step import Step, StepEnd


@dataclass(frozen=True)
class Segmentation:
    """What ends a step.

    Attributes:
        delimiter: Text that ends a step once the step has other text than white space.
        max_step_tokens: Length limit of one step in tokens.
        action_markers: Texts that open an action region.
        stop: The request's stop strings.
        eos_ids: Token ids that end the reply.
    """

    delimiter: str = "\n\n"
    max_step_tokens: int = 256
    action_markers: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    eos_ids: Collection[int] = ()

    @property
    def lookback(self) -> int:
        """How many characters before a step can be the beginning of a stop string or marker that ends in it."""
        return max((len(text) for text in (*self.stop, *self.action_markers)), default=1) - 1


class Segmenter:
    """Collects the tokens of one step.

    Args:
        rules: What ends a step.
        text: Decodes the tokens; may have decoded earlier steps of the same stream.
        before: Text that precedes the step (at least `rules.lookback` characters of it, if there are as many).
        budget: Tokens that the reply may still have, this step's included.
    """

    def __init__(self, rules: Segmentation, text: TextStream, before: str, budget: int) -> None:
        self._rules = rules
        self._stream = text
        self._before = before[-rules.lookback :] if rules.lookback else ""
        self._budget = budget
        self._ids: list[int] = []
        self._text = ""

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens so far."""
        return self._ids

    @property
    def text(self) -> str:
        """Their text."""
        return self._text

    def push(self, token_id: int) -> Step | None:
        """Add one token; returns the step if the token ended it."""
        self._ids.append(token_id)
        piece = self._stream.push(token_id)
        seen = len(self._before) + len(self._text)
        self._text += piece
        end = self._ended_by(token_id, piece, seen)
        return self._step(end) if end is not None else None

    def close(self, reason: str | None) -> Step:
        """The engine ended the stream by itself: `reason` is its finish reason."""
        return self._step(StepEnd.EOS if reason == "stop" else StepEnd.BUDGET)

    def _ended_by(self, token_id: int, piece: str, seen: int) -> StepEnd | None:
        if token_id in self._rules.eos_ids:
            return StepEnd.EOS
        if piece:
            whole = self._before + self._text
            if any(whole.find(stop, max(0, seen - len(stop) + 1)) >= 0 for stop in self._rules.stop):
                return StepEnd.STOP
            if len(self._ids) < self._budget:
                if any(marker in self._text for marker in self._rules.action_markers):
                    return StepEnd.ACTION
                if self._delimited():
                    return StepEnd.DELIMITER
        if len(self._ids) >= self._budget:
            return StepEnd.BUDGET
        if len(self._ids) >= self._rules.max_step_tokens:
            return StepEnd.LIMIT
        return None

    def _delimited(self) -> bool:
        start = len(self._text) - len(self._text.lstrip())
        return self._rules.delimiter in self._text[start:]

    def _step(self, end: StepEnd) -> Step:
        return Step(tuple(self._ids), self._text, end)
