"""Truncates texts for models, traces and terminals; the last line says how much is left out."""

import re

MAX_RESULT_LENGTH = 50_000
"""Maximum length of a tool's result or error for a model, truncation notice included."""

TRUNCATED = re.compile(r"\n… \(cut: [\d,]+ of [\d,]+ characters; [^\n]*\)\s*\Z")
"""The last line of a truncated text, by `truncation_notice`."""


def truncate(text: str, rest: str, most: int = MAX_RESULT_LENGTH) -> str:
    """Truncate a text that is too long; the last line says how much is left out.

    Args:
        text: The text. Lone surrogates, which no message can carry, become "?".
        rest: How the reader gets the rest, such as "ask for fewer rows".
        most: Maximum number of characters shown; with the last line there are at most `MAX_RESULT_LENGTH`.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= min(most, MAX_RESULT_LENGTH):
        return text
    available = MAX_RESULT_LENGTH - len(truncation_notice(len(text), len(text), rest))
    shown = max(0, min(most, available))
    return text[:shown] + truncation_notice(shown, len(text), rest)


def truncation_notice(shown: int, length: int, rest: str) -> str:
    """Return the last line of a truncated text; `rest` says how the reader gets the rest."""
    return f"\n… (cut: {shown:,} of {length:,} characters; {rest})"
