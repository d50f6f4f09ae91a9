"""Removes terminal control sequences from the text of models, tools, files and users."""

import re

_MAX_LENGTH = 4096
"""Longest string sequence (a title, a link, the clipboard), in characters; a longer one is not a sequence."""

# `_INCOMPLETE` matches a sequence that the end of the text truncates, so that `PlainTextStream` can wait for the rest.
# The body matches no control characters, so that a search reads each character once.
_BODY = rf"[^\x00-\x08\x0a-\x1f\x7f-\x9f]{{0,{_MAX_LENGTH}}}"
_SEQUENCE = re.compile(
    rf"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]){_BODY}(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM and APC strings
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor, clearing
)
_INCOMPLETE = re.compile(
    rf"(?:\x1b(?:[\]PX^_]{_BODY}\x1b?|\[[0-?]*[ -/]*)?|[\x90\x98\x9d-\x9f]{_BODY}\x1b?|\x9b[0-?]*[ -/]*)\Z"
)
# Control characters but line feed and tab, and bidirectional overrides, which change the order of reading.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_UNSAFE = re.compile(rf"{_CONTROL.pattern}|{_SURROGATE.pattern}")


def plain(text: str) -> str:
    """The text without terminal sequences, bidirectional overrides, and control characters but line feed and tab."""
    # A lone surrogate cannot be encoded: its escape replaces it.
    if _UNSAFE.search(text) is None:
        return text
    text = _CONTROL.sub("", _SEQUENCE.sub("", text))
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PlainTextStream:
    """`plain` for a text in pieces, which may split a sequence: the joined results equal `plain` of the whole."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """Add a piece and return the text that may be shown now."""
        text = self._held + piece
        begun = _INCOMPLETE.search(text)
        end = len(text) if begun is None else begun.start()
        self._held = text[end:]
        return plain(text[:end])

    def end(self) -> str:
        """Return the held text of a sequence that the end of the text truncated."""
        held, self._held = self._held, ""
        return plain(held)
