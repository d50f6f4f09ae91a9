"""Correctness of replies, and files of problems."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from lookahead_agent.bench.problems import dataset_file, final_number, is_correct, read_problems
from lookahead_agent.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"So \(\boxed{320}\).", Fraction(320)),
        (r"\boxed{\$1,200.50} in 3 days", Fraction(2401, 2)),
        ("First 3, then 4 dollars.", Fraction(4)),
        ("It loses -7.", Fraction(-7)),
        ("It is $452.50.", Fraction(905, 2)),
        ("I cannot say.", None),
    ],
)
def test_final_number_is_the_boxed_or_the_last_one(text: str, number: Fraction | None) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        ("It is 1,000.0.", "1000", True),
        ("It is 1,001.", "1000", False),
        ("I do not know.", "1000", False),
    ],
)
def test_reply_is_correct_if_its_final_number_equals_the_answer(text: str, answer: str, correct: bool) -> None:
    assert is_correct(text, answer) is correct


SOLUTIONS: dict[str, Callable[..., int]] = {
    "notebooks": lambda pens, pen, books, book, paid: paid - pens * pen - books * book,
    "crates": lambda crates, apples, sold, eaten: (crates - sold) * apples - eaten,
    "km per hour": lambda hours, first, more, second, total: total - hours * first - more * second,
    "earns": lambda wage, hours, extra, rent: wage * hours + 2 * wage * extra - rent,
    "tank": lambda start, minutes, rate, leak: start + minutes * (rate - leak),
    "theatre": lambda rows, seats, adults, price, children: (
        rows * seats * price - adults * price - children * price // 2
    ),
}


def test_answers_of_the_packaged_problems_follow_from_their_numbers() -> None:
    problems = read_problems(dataset_file("own"))
    assert len({problem.question for problem in problems}) == len(problems) == 60
    for problem in problems:
        (solve,) = (solve for word, solve in SOLUTIONS.items() if word in problem.question)
        assert problem.answer == str(solve(*map(int, re.findall(r"\d+", problem.question)))), problem.question


def test_ids_and_answers_of_problems_are_optional(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"question": "a", "answer": 3}\n\n{"id": "x", "question": "b"}\n')
    first, second = read_problems(file)
    assert (first.id, first.answer) == ("1", "3")
    assert (second.id, second.answer) == ("x", None)
    assert [problem.id for problem in read_problems(file, limit=1, skip=1)] == ["x"]
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": 1}\n', "line 1 is no problem"),
        ("[1]\n", "line 1 is no problem"),
        ("{\n", "line 1 is no problem"),
        ('{"id": 1, "question": "a"}\n{"id": 1, "question": "b"}\n', "another problem with the id '1'"),
        ("", "no problem after the first 0"),
    ],
)
def test_invalid_problem_files_are_rejected(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read_problems(file)


def test_missing_dataset_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give a JSON Lines file"):
        dataset_file(str(tmp_path / "nowhere.jsonl"))
