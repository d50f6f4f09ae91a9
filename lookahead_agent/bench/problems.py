"""Problems with numeric answers, from a JSON Lines file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from lookahead_agent.errors import ConfigurationError

_NUMBER = r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?\.\d+"
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        id: Its id in the file.
        question: The text that is asked.
        answer: The right answer, a number.
    """

    id: str
    question: str
    answer: str


def read_problems(file: Path, limit: int | None = None, skip: int = 0) -> list[Problem]:
    """Read problems with `id`, `question` and `answer` from a JSON Lines file.

    Raises:
        ConfigurationError: A line that is not a problem, or no problem at all.
    """
    problems = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problems.append(Problem(str(row["id"]), str(row["question"]), str(row["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{file}, line {number} has no id, question and answer: {error!r}") from error
    chosen = problems[skip:][:limit]
    if not chosen:
        raise ConfigurationError(f"{file} has no problem after the first {skip}")
    return chosen


def final_number(text: str) -> Fraction | None:
    """The number that a reply ends with: what is boxed last, else the last number in the text."""
    if boxed := _BOXED.findall(text):
        text = boxed[-1]
    found = re.findall(_NUMBER, text.replace("{,}", ",").replace("\\$", "$"))
    return Fraction(found[-1].replace(",", "").replace("$", "")) if found else None


def is_right(text: str, answer: str) -> bool:
    """Whether a reply ends with the right number."""
    expected = final_number(answer)
    return expected is not None and final_number(text) == expected
