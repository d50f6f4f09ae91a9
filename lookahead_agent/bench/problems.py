"""Problems with answers that can be checked, from a JSON Lines file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.jsonl import read_lines, read_value

OWN = "own"
"""The packaged problems: word problems in several steps. A program made them: no model has been trained on them."""


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        id: Its id in the file.
        question: The text that is asked.
        answer: The correct answer; None: there is nothing to check.
    """

    id: str
    question: str
    answer: str | None

    @property
    def fingerprint(self) -> str:
        """Equal for equal questions and answers."""
        return hashlib.sha256(f"{self.question}\0{self.answer}".encode(errors="surrogatepass")).hexdigest()[:12]


def read_problems(file: Path, limit: int | None = None, skip: int = 0) -> list[Problem]:
    """Read problems with `question`, and possibly `answer` and `id`, from a JSON Lines file.

    Args:
        file: The file. A problem without an id has its line's number.
        limit: How many problems; None: all.
        skip: Problems to leave out at its beginning.

    Raises:
        ConfigurationError: A line that is not a problem, two with one id, or no problem at all.
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
            problem = Problem(
                str(row.get("id", number)), str(row["question"]), str(answer) if answer is not None else None
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


def dataset_file(name: str) -> Path:
    """The file of a dataset: a path, or "own" for the problems that ship with the package.

    Raises:
        ConfigurationError: There is no such file.
    """
    if name == OWN:
        return Path(__file__).parent / "data" / "own.jsonl"
    file = Path(name)
    if not file.is_file():
        raise ConfigurationError(
            f"there is no dataset {name}: give a JSON Lines file with question and answer, or {OWN!r}; "
            "`lookahead-agent bench datasets` lists those that can be downloaded"
        )
    return file
