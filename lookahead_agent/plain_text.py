"""Text of models, tools, files and users without what commands a terminal."""

import re

_LONGEST = 4096
"""Characters of a string that a terminal is sent (a title, a link, the clipboard); longer ones end nowhere."""

# Where the parts of a sequence may be cut, so that a stream can wait for the rest: see `PlainTextStream`.
# No part has a control character in it, so that no text takes more than one look at each character.
_BODY = rf"[^\x00-\x08\x0a-\x1f\x7f-\x9f]{{0,{_LONGEST}}}"
_SEQUENCE = re.compile(
    rf"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]){_BODY}(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM and APC strings
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor, clearing
)
_BEGUN = re.compile(
    rf"(?:\x1b(?:[\]PX^_]{_BODY}\x1b?|\[[0-?]*[ -/]*)?|[\x90\x98\x9d-\x9f]{_BODY}\x1b?|\x9b[0-?]*[ -/]*)\Z"
)
# Controls but line feed and tab, and what makes a line read in another order than it is written.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_UNSAFE = re.compile(rf"{_CONTROL.pattern}|{_SURROGATE.pattern}")


def plain(text: str) -> str:
    """The text without terminal sequences, control characters but line feed and tab, and what reverses the order."""
    # A lone surrogate, which no encoding has, is shown as its escape.
    if _UNSAFE.search(text) is None:
        return text
    text = _CONTROL.sub("", _SEQUENCE.sub("", text))
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PlainTextStream:
    """`plain` of a text that comes in pieces, which may cut a sequence: together they give the same."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """The part of the text so far that may be shown and was not yet."""
        text = self._held + piece
        begun = _BEGUN.search(text)
        end = len(text) if begun is None else begun.start()
        self._held = text[end:]
        return plain(text[:end])

    def end(self) -> str:
        """The rest, where the text ended within a sequence."""
        held, self._held = self._held, ""
        return plain(held)
