"""Where a reply may be speculated on: thoughts may, actions may not (see the README)."""

from __future__ import annotations

from dataclasses import dataclass

from lookahead_agent.models.thinking_tags import ThinkingTags

PROMPT_TAIL = 32
"""Tokens at a prompt's end in which a chat template may have opened the thinking."""


@dataclass(frozen=True)
class ThinkingState:
    """Whether a place in a reply is in its thinking, in which no stop string ends it.

    Attributes:
        tags: The tags around the thinking; None: there is none.
        inside: Whether the place is in the thinking.
        tail: What of the text before it may be the beginning of the next tag.
    """

    tags: ThinkingTags | None = None
    inside: bool = False
    tail: str = ""

    def then(self, text: str) -> ThinkingState:
        """The state after more text."""
        return self._walk(text)[1] if self.tags is not None else self

    def answers(self, text: str, begin: int, end: int) -> bool:
        """Whether a part of the text that follows is all answer; the tags may be part of it."""
        if self.tags is None:
            return True
        return any(start <= begin and end <= stop for start, stop in self._walk(text)[0])

    def _walk(self, text: str) -> tuple[list[tuple[int, int]], ThinkingState]:
        """Where the answer is in the text that follows, and the state after it."""
        assert self.tags is not None
        whole, inside, at = self.tail + text, self.inside, 0
        before = len(self.tail)
        spans: list[tuple[int, int]] = []
        begin = 0
        while (place := whole.find(self._awaited(inside), at)) >= 0:
            at = place + len(self._awaited(inside))
            if inside:
                begin = place
            else:
                spans.append((max(0, begin - before), at - before))
            inside = not inside
        if not inside:
            spans.append((max(0, begin - before), len(text)))
        kept = len(self._awaited(inside)) - 1
        return spans, ThinkingState(self.tags, inside, whole[max(at, len(whole) - kept) :] if kept else "")

    def _awaited(self, inside: bool) -> str:
        assert self.tags is not None
        return self.tags.close if inside else self.tags.open


@dataclass(frozen=True)
class Regions:
    """What in a reply only the target may write.

    Attributes:
        action_markers: Texts that open an action region, such as a tool call.
        thinking: The model's thinking tags; None for models that do not think apart. A step never goes over the
            closing tag.
        answer_from_target: Whether what follows the thinking is the target's alone. A reply without thinking is then
            all the target's.
    """

    action_markers: tuple[str, ...] = ()
    thinking: ThinkingTags | None = None
    answer_from_target: bool = False

    def at_beginning(self, prompt: str) -> ThinkingState:
        """Whether a reply to this prompt begins with thinking."""
        return ThinkingState(self.thinking, self.thinking is not None and self.thinking.opened_by(prompt))

    def begins_outside_thinking(self, prompt: str) -> bool:
        """Whether a reply to this prompt begins where only the target may write."""
        if self.thinking is None or not self.answer_from_target:
            return False
        return not self.thinking.opened_by(prompt)
