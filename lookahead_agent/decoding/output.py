"""The text of a reply as it becomes certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lookahead_agent.engines.tokenizer import Tokenizer


class ReplyText:
    """Collects committed tokens and passes their text on, holding back what may yet be part of a stop string.

    Args:
        tokenizer: Decodes the tokens.
        prompt_ids: The prompt, for decoders that need to know what precedes.
        stop: Stop strings; the reply's text ends before the first of them.
        on_text: Given each piece of text once it is certain.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...],
        on_text: Callable[[str], None],
    ) -> None:
        self._stream = tokenizer.stream(prompt_ids)
        self._stop = stop
        self._held = max((len(text) for text in stop), default=1) - 1
        self._on_text = on_text
        self._passed_on = 0
        self._pieces: list[str] = []
        self._waiting = ""
        """What is committed and not passed on, in which a stop string would begin."""
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        """Everything committed, a stop string included."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add tokens that are certain to be part of the reply."""
        self.token_ids.extend(token_ids)
        self._add("".join(self._stream.push(token_id) for token_id in token_ids))
        self._pass_on(min(self._end(), len(self._waiting) - self._held))

    def finish(self) -> str:
        """Pass on what was held back and return the whole text, cut before a stop string."""
        self._add(self._stream.flush())
        self._pass_on(self._end())
        return self.text[: self._passed_on]

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self._waiting += text

    def _end(self) -> int:
        """Where what waits ends, or a stop string begins in it."""
        found = [position for stop in self._stop if (position := self._waiting.find(stop)) >= 0]
        return min(found, default=len(self._waiting))

    def _pass_on(self, end: int) -> None:
        if end > 0:
            self._on_text(self._waiting[:end])
            self._waiting = self._waiting[end:]
            self._passed_on += end
