"""The tokens of earlier replies, so that a prompt repeats a reply in the tokens that its model wrote.

A text may be encoded in more than one way, and a chat template may set other white space around it. An engine
would read a conversation anew from such a reply on, since its prefix cache goes by tokens. A reply to which the
template gives another form stays as the template has it: the default target, which writes calls as Markdown, repeats
the same call without end where its prompt has calls in that form.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

_MOST_CHARACTERS = 1 << 23  # characters of prompts that are remembered; each prompt of a conversation counts


class _Written(NamedTuple):
    """A reply: the text and the tokens of its prompt, its own without its end, and the text that ends it."""

    prompt: str
    prompt_ids: Sequence[int]
    reply: str
    reply_ids: Sequence[int]
    end: str


class WrittenReplies:
    """Remembers the latest replies of a model; threads may share it."""

    def __init__(self, most_characters: int = _MOST_CHARACTERS) -> None:
        self._written: OrderedDict[tuple[str, str], _Written] = OrderedDict()
        self._most = most_characters
        self._characters = 0
        self._lock = threading.Lock()

    def add(self, prompt: str, prompt_ids: Sequence[int], reply: str, reply_ids: Sequence[int], end: str) -> None:
        """Remember a reply: its prompt, its text and tokens without the one that ends it, and the text of that one."""
        written = _Written(prompt, array("i", prompt_ids), reply.strip(), array("i", reply_ids), end)
        with self._lock:
            known = self._written.pop((prompt, written.reply), None)
            self._characters += len(prompt) if known is None else 0
            self._written[prompt, written.reply] = written
            while self._characters > self._most:
                self._characters -= len(self._written.popitem(last=False)[1].prompt)

    def ids_of(self, text: str, encode: Callable[[str], list[int]]) -> list[int] | None:
        """The tokens of a prompt, `encode` making those after the last known reply; None: there is no such reply."""
        with self._lock:
            known = [written for written in self._written.values() if text.startswith(written.prompt)]
        for written in sorted(known, key=lambda written: -len(written.prompt)):
            close = text.find(written.end, len(written.prompt))
            if close >= 0 and text[len(written.prompt) : close].strip() == written.reply:
                return [*written.prompt_ids, *written.reply_ids, *encode(text[close:])]
        return None
