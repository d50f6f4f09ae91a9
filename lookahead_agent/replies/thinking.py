"""Parts a reply's thinking from its answer."""

from __future__ import annotations

from collections.abc import Callable

from lookahead_agent.models.thinking_tags import ThinkingTags


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Length of the text's end that may be the beginning of a marker."""
    for length in range(max((len(marker) for marker in markers), default=1) - 1, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers if len(marker) > length):
            return min(length, len(text))
    return 0


class ThinkingSplitter:
    """Passes the thinking and the answer of a reply on, each by itself, as they come.

    Args:
        tags: The tags around the thinking; None: all is answer.
        inside: Whether the reply begins inside the thinking, since the prompt has opened it.
        on_thinking: Given the pieces of the thinking.
        on_answer: Given the pieces of the answer.

    White space around the thinking and before the answer is nobody's.
    """

    def __init__(
        self,
        tags: ThinkingTags | None,
        inside: bool,
        on_thinking: Callable[[str], None],
        on_answer: Callable[[str], None],
    ) -> None:
        self._tags = tags
        self._inside = self._has_thought = inside
        self._on = {True: on_thinking, False: on_answer}
        self._parts = {True: "", False: ""}
        self._pending = ""
        self._begun = False

    @property
    def thinking(self) -> str:
        """The thinking so far."""
        return self._parts[True]

    @property
    def answer(self) -> str:
        """The answer so far."""
        return self._parts[False]

    def push(self, text: str) -> None:
        """Add text."""
        if self._tags is None:
            self._pass_on(text)
            return
        self._pending += text
        while True:
            if not self._begun and not self._inside:
                # The thinking can only be what the reply begins with.
                begin = self._pending.lstrip()
                if self._tags.open.startswith(begin):
                    return
                self._begun = True
                if not begin.startswith(self._tags.open):
                    continue
                self._inside = self._has_thought = True
                self._pending = begin.removeprefix(self._tags.open)
            self._begun = True
            if not self._inside:
                self._pass_on(self._pending)
                self._pending = ""
                return
            thought, found, rest = self._pending.partition(self._tags.close)
            if not found:
                certain = self._pending[: len(self._pending) - held_back(self._pending, (self._tags.close,))].rstrip()
                self._pass_on(certain)
                self._pending = self._pending[len(certain) :]
                return
            self._pass_on(thought.rstrip())
            self._inside = False
            self._pending = rest

    def finish(self) -> None:
        """Pass on what was held back."""
        self._pass_on(self._pending.rstrip() if self._inside else self._pending)
        self._pending = ""

    def _pass_on(self, text: str) -> None:
        part = self._parts[self._inside]
        if not part and self._has_thought:
            text = text.lstrip()
        if text:
            self._parts[self._inside] = part + text
            self._on[self._inside](text)
