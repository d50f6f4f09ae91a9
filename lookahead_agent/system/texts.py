"""Checks that texts can be encoded, and truncates those for models, traces and terminals."""

import re
from collections.abc import Mapping
from typing import Any

from lookahead_agent.errors import ConfigurationError

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


def check_encodable(value: Any, name: str) -> None:
    """Check that every string in a value, with its lists and mappings, can be encoded; errors call the value `name`.

    Raises:
        ConfigurationError: A string has a lone surrogate, which is half a character; the message says where.
    """
    remaining: list[tuple[Any, str]] = [(value, name)]
    while remaining:
        value, name = remaining.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ConfigurationError(
                    f"{name}: character {error.start} is the lone surrogate U+{ord(value[error.start]):04X}, half a "
                    "character; replace it, for example by text.encode(errors='replace').decode()"
                ) from None
        elif isinstance(value, Mapping):
            remaining += [(key, f"a key of {name}") for key in value]
            remaining += [(entry, f"{name}.{ascii(key)[1:-1]}"[:100]) for key, entry in value.items()]
        elif isinstance(value, (list, tuple)):
            remaining += [(entry, f"{name}.{place}"[:100]) for place, entry in enumerate(value)]
