"""The text of a reply as it becomes certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lookahead_agent.decoding.regions import ThinkingState
from lookahead_agent.engines.tokenizer import Tokenizer


class ReplyText:
    """Collects committed tokens and passes their text on, holding back what may yet be part of a stop string.

    Args:
        tokenizer: Decodes the tokens.
        prompt_ids: The prompt, for decoders that need to know what precedes.
        stop: Stop strings; the reply's text ends before the first of them in its answer.
        on_text: Given each piece of text once it is certain.
        thinking: Whether the reply begins with thinking.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...],
        on_text: Callable[[str], None],
        thinking: ThinkingState | None = None,
    ) -> None:
        self._stream = tokenizer.stream(prompt_ids)
        self._stop = stop
        self._held = max((len(text) for text in stop), default=1) - 1
        self._on_text = on_text
        self._passed_on = 0
        self._thinking = thinking or ThinkingState()
        """Whether what waits begins in the thinking."""
        self._pieces: list[str] = []
        self._waiting = ""
        """What is committed and not passed on, in which a stop string would begin."""
        self.token_ids: list[int] = []
        self.text_ends: list[int] = []
        """Length of the text after each token."""
        self._length = 0

    @property
    def text(self) -> str:
        """Everything committed, a stop string included."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add tokens that are certain to be part of the reply."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            self._add(self._stream.push(token_id))
            self.text_ends.append(self._length)
        self._pass_on(min(self._end(), len(self._waiting) - self._held))

    def finish(self) -> str:
        """Pass on what was held back and return the whole text, cut before a stop string."""
        self._add(self._stream.flush())
        self._pass_on(self._end())
        return self.text[: self._passed_on]

    def _add(self, text: str) -> None:
        text = encodable(text)
        self._pieces.append(text)
        self._length += len(text)
        self._waiting += text

    def _end(self) -> int:
        """Where what waits ends, or a stop string begins in it."""
        return min(map(self._begin_of, self._stop), default=len(self._waiting))

    def _begin_of(self, stop: str) -> int:
        """Where a stop string begins that ends the reply, or the end of what waits."""
        at = -1
        while (at := self._waiting.find(stop, at + 1)) >= 0:
            if self._thinking.answers(self._waiting, at, at + len(stop)):
                return at
        return len(self._waiting)

    def _pass_on(self, end: int) -> None:
        if end > 0:
            self._on_text(self._waiting[:end])
            if self._stop:
                self._thinking = self._thinking.then(self._waiting[:end])
            self._waiting = self._waiting[end:]
            self._passed_on += end


def encodable(text: str) -> str:
    """Text without half surrogate pairs, which neither UTF-8 nor clients' JSON readers can carry."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
