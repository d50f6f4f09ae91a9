"""Where a reply is inside its thinking, and how many tokens of it are left."""

from dataclasses import dataclass, replace

from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.tokenizer import Tokenizer


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
class ThinkingBudget:
    """The tokens that the thinking of a reply has left at a position."""

    left: int
    state: ThinkingState

    @property
    def is_used_up(self) -> bool:
        """Whether the position is inside the thinking, and no further token of it may follow."""
        return self.left <= 0 and self.state.inside

    def then(self, piece: str) -> "ThinkingBudget":
        """The budget after one more token with this text."""
        state = self.state.then(piece)
        is_tag = self.state.tags is not None and not state.inside and piece in self.state.tags.close
        return ThinkingBudget(self.left - (self.state.inside and not is_tag), state)

    def outside(self) -> "ThinkingBudget":
        """The budget at a position where an opening tag opens no thinking."""
        return replace(self, state=ThinkingState(self.state.tags))


def closing_tokens(tokenizer: Tokenizer, state: ThinkingState) -> list[int]:
    """The tokens that close the thinking at a position inside it: the closing tag, and what separates the answer."""
    tags = state.tags
    assert tags is not None
    text = tags.close + tags.separator
    begun = partial_tag(state.tail, tags.close)
    if begun and len(tokenizer.encode(tags.close)) > 1:  # the model is writing the tag
        text = text[begun:]
    return tokenizer.encode(text)


def partial_tag(text: str, tag: str) -> int:
    """Return the length of the text's end that may be the beginning of a tag."""
    longest = min(len(tag) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if tag.startswith(text[-length:])), 0)
