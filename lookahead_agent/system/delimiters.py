"""Finds step delimiters in bounded time."""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import regex

from lookahead_agent.errors import ConfigurationError

_SEARCH_SECONDS = 0.02
"""Time limit of one pattern search: a step has a few kilobytes, and a search of it takes microseconds."""
_MAX_PATTERN_LENGTH = 1000  # characters of a pattern
_MAX_REPETITIONS = 1000  # product of the numbers in a pattern's `{…}`: `regex` may expand each, which takes memory
_REPETITION = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_FLAGS = {re.I: regex.I, re.M: regex.M, re.S: regex.S, re.X: regex.X, re.A: regex.A}
_EMPTY = "the delimiter matches the empty text: steps would have no end and no beginning"

Finder = Callable[[str, int], Iterator[Any]]  # finds matches in a text, from a position on


@lru_cache(maxsize=256)
def delimiter_finder(delimiter: str | re.Pattern[str]) -> Finder:
    """Compile a delimiter into a finder; ConfigurationError if it is too large, or matches the empty text."""
    # Patterns run in `regex`, since `re` has no timeout and holds the GIL.
    if isinstance(delimiter, str):
        if delimiter == "":
            raise ConfigurationError(_EMPTY)
        return re.compile(re.escape(delimiter)).finditer
    written, repetitions = delimiter.pattern, 1
    for least, most in _REPETITION.findall(written):
        repetitions *= max([1, *(int(number[:9]) for number in (least, most) if number)])
    if len(written) > _MAX_PATTERN_LENGTH or repetitions > _MAX_REPETITIONS:
        raise ConfigurationError(
            f"the delimiter's pattern is too large: it has at most {_MAX_PATTERN_LENGTH} characters and "
            f"{_MAX_REPETITIONS} repetitions"
        )
    try:
        compiled = regex.compile(written, sum(other for own, other in _FLAGS.items() if delimiter.flags & own))
        empty = compiled.match("", timeout=_SEARCH_SECONDS) is not None
    except TimeoutError:
        raise too_slow(delimiter) from None
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise ConfigurationError(f"the delimiter /{written}/ cannot be searched for: {error}") from None
    if empty:
        raise ConfigurationError(_EMPTY)
    return partial(compiled.finditer, timeout=_SEARCH_SECONDS)


def too_slow(delimiter: str | re.Pattern[str]) -> ConfigurationError:
    """The error for a delimiter whose search takes too long."""
    pattern = delimiter if isinstance(delimiter, str) else delimiter.pattern
    return ConfigurationError(
        f"the search for the delimiter /{pattern}/ took longer than {_SEARCH_SECONDS:g} s: give one without "
        "repetitions in repetitions"
    )
