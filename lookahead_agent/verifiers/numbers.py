"""The numbers of a text, as values: steps with different results never mean the same."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

_ENUMERATOR = re.compile(r"^[ \t>*#-]*(?:step\s+)?\d+[.):](?=\s|\*)", re.IGNORECASE | re.MULTILINE)
_BULLET = re.compile(r"^[ \t]*[-*+•][ \t]+", re.MULTILINE)
# "\frac{1}{12}", and "\frac1{12}" or "\frac12", where one digit needs no braces.
_LATEX_FRACTION = re.compile(r"\\[dt]?frac" + 2 * r"\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))")
_LATEX_NOISE = re.compile(r"\\[,;:! ]|\\left|\\right|\{,\}")
NUMBER = re.compile(
    r"""
    (?P<sign>                                     # a sign, where it cannot be a subtraction
        (?<![\w)\]}%.]) (?<![\w)\]}%]\s) [-−–] \s?
      | (?<=[A-Za-z]\s) (?<!\b[A-Za-z]\s) [-−–] (?=[$€£.\d])
    )?
    (?P<currency> [$€£] )? \s?
    (?P<digits> \d{1,3}(?:,\d{3})+(?:\.\d+)? | \d+(?:\.\d+)? | (?<!\d)\.\d+ )
    (?: \s? (?P<percent> \\?% | percent\b ) )?
    """,
    re.VERBOSE,
)


def normalized(text: str) -> str:
    """The text without the bullets and enumerators of lists and LaTeX's spelling of numbers."""
    text = _ENUMERATOR.sub("", _BULLET.sub("", text))
    text = _LATEX_NOISE.sub(lambda match: "," if match.group() == "{,}" else "", text)
    text = _LATEX_FRACTION.sub(lambda match: f" {match[1] or match[2]} / {match[3] or match[4]} ", text)
    return text.replace("\\$", "$")


@lru_cache(maxsize=1024)
def numbers(text: str) -> frozenset[Fraction | str]:
    """The distinct numbers in `text` by value.

    Thousands separators, currency signs, trailing zeros and the spelling of LaTeX fractions make no difference; the
    sign does, and a percentage is not the bare number. The enumerators of lists ("2.", "Step 3:") are not counted:
    they number the thoughts and are no part of them.
    """
    return frozenset(_by_place(text).values())


def _by_place(text: str) -> dict[tuple[int, int], Fraction | str]:
    """The numbers by where they begin and end in the normalized text."""
    found: dict[tuple[int, int], Fraction | str] = {}
    for match in NUMBER.finditer(normalized(text)):
        value = Fraction(match["digits"].replace(",", ""))
        if match["sign"]:
            value = -value
        found[match.span()] = f"{value}%" if match["percent"] else value
    return found


def numbers_so_far(text: str) -> frozenset[Fraction | str]:
    """Numbers that are in `text` and in everything that may come of it by writing on.

    The last word may go on ("1" to "12"), and the one before may get a sign of percentage or turn out to be half of
    something; both are left out, and so is a number that the words after it make another.
    """
    settled = re.search(r"^(.*\s)\S+\s+\S+\s+\S*\Z", text, re.DOTALL)
    if settled is None:
        return frozenset()
    # Compared place by place: a value that changes may stand again further on, where it is not settled.
    return frozenset(value for _, value in _by_place(settled[1]).items() & _by_place(text).items())
