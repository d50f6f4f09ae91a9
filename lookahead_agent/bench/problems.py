"""Problems with answers that can be checked, from a JSON Lines file or packaged."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.jsonl import read_lines, read_value

OWN = "own"  # the packaged problems: a program made them, and no model has been trained on them

_NUMBER = r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?\.\d+"
_TOLERANCE = 0.006
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


@dataclass(frozen=True)
class Problem:
    """One problem."""

    id: str  # in the dataset
    question: str
    answer: str | None  # the number that the reply must end with; None: `check` says it, or nothing does
    tools: tuple[str, ...] = ()  # names of the tools that it needs; none: all that there are
    check: Mapping[str, Any] | None = None

    @property
    def fingerprint(self) -> str:
        """Equal for equal questions and answers."""
        checked = self.answer if self.check is None else json.dumps(self.check, sort_keys=True)
        return hashlib.sha256(f"{self.question}\0{checked}".encode(errors="surrogatepass")).hexdigest()[:12]

    def accepts(self, reply: str) -> bool | None:
        """Whether a reply is correct; None: nothing to check."""
        if self.answer is not None:
            return is_correct(reply, self.answer)
        if self.check is None:
            return None
        numbers = [float(found.replace(",", "").replace("$", "")) for found in re.findall(_NUMBER, reply)]
        wanted = self.check.get("number")
        return all(
            any(text.lower() in reply.lower() for text in texts.split("|")) for texts in self.check.get("text", ())
        ) and (wanted is None or any(abs(number - wanted) <= _TOLERANCE for number in numbers))


def read_problems(file: Path, limit: int | None = None, skip: int = 0) -> list[Problem]:
    """Read problems from a JSON Lines file.

    A line has `question`, and possibly `id` (else the line's number), `answer`, or `check` and `tools`; see `Problem`.
    """
    try:
        lines = read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    problems: dict[str, Problem] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = read_value(line)
            answer = row.get("answer")
            check = row.get("check")
            problem = Problem(
                str(row.get("id", number)),
                str(row["question"]),
                str(answer) if answer is not None else None,
                tuple(map(str, row.get("tools", ()))),
                None if not check or "file" in check else _check(check),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{file}, line {number} is no problem with a question: {error!r}") from error
        if problem.id in problems:
            raise ConfigurationError(f"{file}, line {number}: there is another problem with the id {problem.id!r}")
        problems[problem.id] = problem
    chosen = list(problems.values())[skip:][:limit]
    if not chosen:
        raise ConfigurationError(f"{file} has no problem after the first {skip}")
    return chosen


def _check(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's `check`, of which nothing else is known."""
    known = {"text": [str(text) for text in row.get("text", ())]}
    return known | ({"number": float(row["number"])} if "number" in row else {})


def dataset_file(name: str) -> Path:
    """The file of a dataset: a path, or "own" for the problems that ship with the package."""
    if name == OWN:
        return Path(__file__).parent / "data" / "own.jsonl"
    file = Path(name)
    if not file.is_file():
        raise ConfigurationError(
            f"there is no dataset {name}: give a JSON Lines file with question and answer, or {OWN!r}"
        )
    return file


def is_correct(text: str, answer: str) -> bool:
    """Whether a reply ends with the answer's number."""
    expected = final_number(answer)
    return expected is not None and final_number(text) == expected


def final_number(text: str) -> Fraction | None:
    """The number that a reply ends with: what is boxed last, else the last number in the text."""
    if boxed := _BOXED.findall(text):
        text = boxed[-1]
    found = re.findall(_NUMBER, text.replace("{,}", ",").replace("\\$", "$"))
    return Fraction(found[-1].replace(",", "").replace("$", "")) if found else None
