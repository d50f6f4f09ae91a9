"""Whether a reply ends with the expected answer: a number, the letter of a choice, or mathematics."""

import logging
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Literal

from lookahead_agent.bench import mathematics

logger = logging.getLogger(__name__)

Kind = Literal["number", "choice", "mathematics"]

_LONGEST = 500  # characters of an expression
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_SIGN = r"(?:(?<![\w).])-)?\$?"
_NUMBER = rf"{_SIGN}(?:{_DIGITS})"
# A mixed number, a fraction in LaTeX or in ASCII, or a number.
_VALUE = re.compile(
    rf"(?P<sign>{_SIGN})(?:(?:(?P<whole>\d+)\s*)?\\[dt]?frac\s*\{{\s*(?P<above>{_NUMBER})\s*\}}"
    rf"\s*\{{\s*(?P<below>{_NUMBER})\s*\}}"
    rf"|(?:(?P<mixed>\d{{1,3}})\s+)?(?P<over>{_DIGITS})\s*/\s*(?P<under>{_DIGITS})(?!\s*/|[.,]?\d)|(?P<number>{_DIGITS}))"
)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}")
_MARKUP = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:! ]|\\quad|~|\*\*|\\[()\[\]]|\^\s*\{?\s*\\circ\s*\}?")
# A name and "=", a value, and a unit: what holds more is mathematics.
_PLAIN = re.compile(
    rf"(?:[A-Za-z][A-Za-z ]*\s*[=:]\s*)?(?P<value>{_VALUE.pattern})\s*%?(?:\s+(?!pi\b)[A-Za-z]{{2,}}[A-Za-z /]*"
    r"(?:\^\s*\{?[23]\}?)?)?\.?"
)
_UNIT_BEFORE = re.compile(r"[A-Za-z]\s*\^\s*\{?\s*$")  # a unit before its exponent, as in "12 cm^2"
# Text before a number that is part of an expression.
_EXPRESSION_BEFORE = re.compile(r"(?:\^\s*\{?|\\sqrt\s*(?:\[[^\]]*\])?\s*\{?|\\(?:times|cdot|pi)\s*|[×·]\s*)$")
_CHOICE = re.compile(r"\(?([A-Z])\)?[.:]?")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
# The letter that a reply states: after "answer" or "option", alone on a line, or in parentheses.
_STATED = re.compile(
    r"(?:[Aa]nswer|ANSWER|[Oo]ption|[Cc]hoice)\b[^A-Za-z0-9\n]{0,8}(?:is|:)?[^A-Za-z0-9\n]{0,8}(?:(?:option|choice)\s+)?"
    r"\(?([A-Z])\b(?!['’]|\s+[a-z])|^[\W_]*([A-Z])[\W_]*$|\(([A-Z])\)",
    re.MULTILINE,
)


def kind_of(answer: str) -> Kind | None:
    """Return how an expected answer is compared with replies; None: not at all, since it is not such an answer.

    An answer in mathematics may still be one that math-verify cannot read.
    """
    text = _strip_solution(answer)
    if _PLAIN.fullmatch(text) and _fraction(text) is not None:
        return "number"
    if _CHOICE.fullmatch(text):
        return "choice"
    return "mathematics" if text and not _WORD.search(_MARKUP.sub("", answer)) else None


def compare_formulas(expected: str, given: str) -> bool | None:
    """Return whether two formulas are equal; None: they cannot be compared, as without math-verify (with a warning)."""
    if not mathematics.is_installed():
        _warn_once()
        return None
    return mathematics.compare([(expected, given)])[0]


@cache
def _warn_once() -> None:
    logger.warning("replies that end with a formula are not checked: pip install 'lookahead-agent[bench]'")


def is_correct(text: str, answer: str, compare: Callable[[str, str], bool | None] = compare_formulas) -> bool | None:
    """Return whether a reply ends with the answer; None: its last formula cannot be compared by `compare`."""
    expected, kind = _strip_solution(answer), kind_of(answer)
    if kind is None:
        return None
    if kind == "choice":
        return final_choice(text) == expected.strip("().:")
    if kind == "number" and (number := final_number(text)) is not None:
        return number == _fraction(expected)
    boxed = _last_box(text)
    given = (boxed if boxed is not None else _last_formula(text))[:_LONGEST]
    # A reply without a number or a formula states no such answer.
    return compare(expected, given) if re.search(r"\d|\\", given) or kind == "mathematics" else False


def final_number(text: str) -> Fraction | None:
    """Return the last number of a reply: of its last LaTeX box, if there is one, else of the text.

    None if there is none, or if it is part of an expression, such as `2^{10}`.
    """
    boxed = _last_box(text)
    if boxed is not None:
        boxed = _clean(boxed)
        return _fraction(boxed) if _PLAIN.fullmatch(boxed) else None
    return _fraction(_clean(text))


def final_choice(text: str) -> str | None:
    """Return the letter of the choice that a reply states last: in its last LaTeX box, if there is one."""
    boxed = _last_box(text)
    if boxed is not None:
        match = re.match(r"\(?([A-Z])(?:\)|\b)", _clean(boxed))
        return match[1] if match else None
    found = [next(filter(None, groups)) for groups in _STATED.findall(text)]
    return found[-1] if found else None


def _strip_solution(answer: str) -> str:
    """The answer itself: GSM8K's have it after `####`."""
    return _clean(answer.rpartition("####")[2])


def _clean(text: str) -> str:
    """Remove LaTeX's markup of texts and spaces, and write signs in ASCII."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = _MARKUP.sub(r" \1 ", text)
    return _SPACES.sub(" ", text).strip()


def _last_box(text: str) -> str | None:
    boxed = _BOXED.findall(text)
    return boxed[-1] if boxed else None


def _last_formula(text: str) -> str:
    """The last formula of a reply without a box, or its last line."""
    formulas = re.findall(r"\$\$?([^$\n]+)\$|\\\(([^\n]+?)\\\)|\\\[([^\n]+?)\\\]", text)
    if formulas:
        return "".join(formulas[-1])
    lines = text.strip().splitlines()
    return lines[-1].rpartition(":")[2].strip(" .") if lines else ""


def _fraction(text: str) -> Fraction | None:
    """The last number of a text; None if there is none, or it is part of an expression."""
    for found in reversed([*_VALUE.finditer(text)]):
        before = text[max(0, found.start() - _LONGEST) : found.start()]
        if _UNIT_BEFORE.search(before):
            continue
        return None if _EXPRESSION_BEFORE.search(before) else _read(found.groupdict())
    return None


def _read(groups: Mapping[str, str | None]) -> Fraction | None:
    sign = -1 if "-" in (groups["sign"] or "") else 1
    if (number := groups["number"]) is not None:
        return sign * _number(number)
    whole = int(groups["whole"] or groups["mixed"] or 0)
    above, below = (groups["above"] or groups["over"], groups["below"] or groups["under"])
    assert above is not None
    assert below is not None
    divisor = _number(below)
    return sign * (whole + _number(above) / divisor) if divisor else None


def _number(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace("$", ""))
