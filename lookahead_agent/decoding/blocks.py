"""Blocks of text that a step must not be cut in: fenced code and LaTeX displays, which may contain blank lines."""

from __future__ import annotations

import re

_MARKS = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})|(?P<display>\\\[|\\\]|\$\$)|\\(?P<side>begin|end)\{(?P<name>\w+\*?)\}", re.MULTILINE
)
_CLOSES = {"\\[": "\\]", "$$": "$$"}


def open_block(text: str, inside: str | None = None) -> str | None:
    """What would close the block that is open at the end of a text; None outside of any.

    Args:
        text: The text.
        inside: What would close the block that is open at its beginning.
    """
    for match in _MARKS.finditer(text):
        fence, display, side, name = match["fence"], match["display"], match["side"], match["name"]
        if inside is not None:
            if inside in (fence, display) or (side == "end" and inside == name):
                inside = None
        elif fence:
            inside = fence
        elif display in _CLOSES:
            inside = _CLOSES[display]
        elif side == "begin":
            inside = name
    return inside
