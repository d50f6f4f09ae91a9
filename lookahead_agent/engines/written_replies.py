"""The tokens of earlier replies, so that a prompt repeats a reply in the tokens that its model generated.

A text has several encodings, and a chat template may add other white space around it. The prefix cache compares tokens,
so an engine would prefill a conversation again from such a reply on. A reply to which the template gives another form
keeps that form. The default target writes calls as Markdown, and repeats the same call without end if its prompt has
calls in that form.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

_MAX_CHARACTERS = 1 << 23  # characters of remembered prompts; each prompt of a conversation counts
_MAX_REPLIES = 4096  # remembered replies: each prompt is compared with theirs, in less than a millisecond


class _CachedReply(NamedTuple):
    """A reply: text and tokens of its prompt, its own without the end token, and the text of the end token."""

    prompt: str
    prompt_ids: Sequence[int]
    reply: str
    reply_ids: Sequence[int]
    end: str


class ReplyTokenCache:
    """Remembers the latest replies of a model; thread-safe."""

    def __init__(self, max_characters: int = _MAX_CHARACTERS) -> None:
        self._replies: OrderedDict[tuple[str, str], _CachedReply] = OrderedDict()
        self._max_characters = max_characters
        self._characters = 0
        self._lock = threading.Lock()

    def add(self, prompt: str, prompt_ids: Sequence[int], reply: str, reply_ids: Sequence[int], end: str) -> None:
        """Remember a reply: its prompt, its text and tokens without the end token, and the text of the end token."""
        entry = _CachedReply(prompt, array("i", prompt_ids), reply.strip(), array("i", reply_ids), end)
        with self._lock:
            previous = self._replies.pop((prompt, entry.reply), None)
            self._characters += len(prompt) if previous is None else 0
            self._replies[prompt, entry.reply] = entry
            while self._characters > self._max_characters or len(self._replies) > _MAX_REPLIES:
                self._characters -= len(self._replies.popitem(last=False)[1].prompt)

    def ids_of(self, text: str, encode: Callable[[str], list[int]]) -> list[int] | None:
        """The tokens of a prompt, where `encode` makes those after the last known reply; None if no reply is known."""
        with self._lock:
            candidates = [entry for entry in self._replies.values() if text.startswith(entry.prompt)]
        for entry in sorted(candidates, key=lambda entry: -len(entry.prompt)):
            end = text.find(entry.end, len(entry.prompt))
            if end >= 0 and text[len(entry.prompt) : end].strip() == entry.reply:
                return [*entry.prompt_ids, *entry.reply_ids, *encode(text[end:])]
        return None
