"""Checks of answers: numbers, mathematics, choices, code."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from fractions import Fraction
from typing import Literal, get_args

from lookahead_agent.agents.templates import template
from lookahead_agent.errors import ConfigurationError, MissingExtraError

AnswerKind = Literal["number", "math", "choice", "code"]
"""How answers are compared: as numbers, as mathematical expressions, as letters of choices, or by running tests."""

_NUMBER = r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?\.\d+"
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_CHOICE = re.compile(r"(?:answer|choice|option)[^A-Za-z0-9]*(?:is)?[^A-Za-z0-9]*\(?([A-J])\b", re.IGNORECASE)
_LONE_LETTER = re.compile(r"(?<![A-Za-z'])([A-J])(?![A-Za-z'])")
_CODE_BLOCK = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)```", re.DOTALL)


def is_correct(text: str, answer: str, kind: AnswerKind = "number") -> bool:
    """Whether a reply gives the correct answer; for "code" that is Python, which raises if the reply's code is wrong.

    Raises:
        ConfigurationError: The kind does not exist.
        MissingExtraError: "math" needs math-verify.
    """
    if kind not in _CHECKS:
        raise ConfigurationError(f"answers are {', '.join(get_args(AnswerKind))}, not {kind!r}")
    return _CHECKS[kind](text, answer)


def final_number(text: str) -> Fraction | None:
    """The number that a reply ends with: what is boxed last, else the last number in the text."""
    if boxed := _BOXED.findall(text):
        text = boxed[-1]
    found = re.findall(_NUMBER, text.replace("{,}", ",").replace("\\$", "$"))
    return Fraction(found[-1].replace(",", "").replace("$", "")) if found else None


def final_choice(text: str) -> str | None:
    """The letter that a reply chooses: what is boxed, what is called the answer, else the last single letter."""
    for found in (_BOXED.findall(text), _CHOICE.findall(text), _LONE_LETTER.findall(text)):
        letters = [alone[-1] for entry in found if (alone := re.findall(r"\b[A-Ja-j]\b", entry))]
        if letters:
            return str(letters[-1]).upper()
    return None


def final_code(text: str) -> str:
    """The reply's code: its last block of it, else all."""
    blocks = _CODE_BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _same_number(text: str, answer: str) -> bool:
    expected = final_number(answer)
    return expected is not None and final_number(text) == expected


def _same_mathematics(text: str, answer: str) -> bool:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtraError(
            "answers in mathematics are compared by math-verify: pip install 'lookahead-agent[bench]'"
        ) from error
    # Its time-outs are signals, which only the main thread may have.
    expected = parse(answer if "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
    return bool(verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None))


def _same_choice(text: str, answer: str) -> bool:
    return final_choice(text) == answer.strip(" ().").upper()


def _passes_tests(text: str, answer: str) -> bool:
    """Run the reply's code and its tests in a process with limits in a sandbox (`lookahead_agent.sandbox`)."""
    # Code that ends early, and prints what it likes before, has not passed.
    sign = uuid.uuid4().hex
    try:
        printed = template("tools", "python_code").run_python(f"{final_code(text)}\n\n{answer}\n\nprint({sign!r})")
    except ValueError:
        return False
    return str(printed).rstrip().endswith(sign)


_CHECKS: dict[str, Callable[[str, str], bool]] = {
    "number": _same_number,
    "math": _same_mathematics,
    "choice": _same_choice,
    "code": _passes_tests,
}
