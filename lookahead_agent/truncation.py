"""Truncates texts for models, traces and terminals; the last line says how much is left out."""

import re

TRUNCATED = re.compile(r"\n… \(cut: [\d,]+ of [\d,]+ characters; [^\n]*\)\s*\Z")
"""The last line of a truncated text, by `truncation_notice`."""


def truncate(text: str, most: int, rest: str) -> str:
    """Return a text's first `most` characters, with a notice if there are more; see `truncation_notice`."""
    return text if len(text) <= most else text[:most] + truncation_notice(most, len(text), rest)


def truncation_notice(shown: int, length: int, rest: str) -> str:
    """Return the last line of a truncated text; `rest` says where the rest is, or how the model gets it."""
    return f"\n… (cut: {shown:,} of {length:,} characters; {rest})"
