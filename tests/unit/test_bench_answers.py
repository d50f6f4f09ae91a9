"""Correctness of replies, and files of problems."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from lookahead_agent.bench.answers import final_number, is_correct, kind_of
from lookahead_agent.bench.mathematics import compare
from lookahead_agent.bench.problems import dataset_file, read_problems
from lookahead_agent.errors import ConfigurationError, MissingExtraError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"So \(\boxed{320}\).", Fraction(320)),
        (r"\boxed{\$1,200.50} in 3 days", Fraction(2401, 2)),
        ("First 3, then 4 dollars.", Fraction(4)),
        ("It loses -7.", Fraction(-7)),
        ("It is $452.50.", Fraction(905, 2)),
        ("I cannot say.", None),
        (r"\boxed{\frac{3}{2}}", Fraction(3, 2)),
        (r"\boxed{-\dfrac{1}{2}}", Fraction(-1, 2)),
        ("So it is 3/2 of a cake.", Fraction(3, 2)),
        ("So it is 1,200 / 3.", Fraction(400)),
        ("They need 2 1/2 cups.", Fraction(5, 2)),
        (r"\boxed{2\frac{1}{2}}", Fraction(5, 2)),
        ("The result is \N{MINUS SIGN}3.", Fraction(-3)),
        ("$x = \N{MINUS SIGN}7$", Fraction(-7)),
        ("It is 10-3=7, so 10-15.", Fraction(15)),
        (r"\boxed{18\text{ dollars}}", Fraction(18)),
        (r"\boxed{x = 5}", Fraction(5)),
        (r"\boxed{12\text{ cm}^2}", Fraction(12)),
        ("The area is 12 cm^2.", Fraction(12)),
        (r"\boxed{50\%}", Fraction(50)),
        ("3/0", None),
        (r"\boxed{B}", None),
        (r"\boxed{2^{10}}", None),
        (r"\boxed{\sqrt{9}}", None),
        (r"\boxed{5x}", None),
        (r"\boxed{3 \times 10}", None),
        ("It is 2^{10}", None),
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
        (r"\boxed{\frac{3}{2}}", "1/2", False),
        (r"\boxed{\frac{3}{2}}", "1.5", True),
        (r"\boxed{\frac{3}{2}}", "2", False),
        ("The result is \N{MINUS SIGN}3.", "3", False),
        ("The result is \N{MINUS SIGN}3.", "\N{MINUS SIGN}3", True),
        ("72 clips", "He sold 48/2 = <<48/2=24>>24 clips.\n#### 72", True),
        ("It is $5.", "$5", True),
        (r"\boxed{B}", "3", False),
        (r"I compare. \boxed{B}", "B", True),
        (r"I compare 3 of them. \boxed{\text{(B) } 12}", "B", True),
        (r"\boxed{12}", "B", False),
        ("Option A is wrong. The correct answer is (C).", "C", True),
        ("**Answer: D**", "(D)", True),
        ("The answer is a banana.", "A", False),
        ("I think that\n\nC", "C", True),
        ("A cat sat.", "A", False),
        ("anything", "the red one", None),
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
        ('{"id": 1}\n', "line 1 is not a problem"),
        ("[1]\n", "line 1 is not a problem"),
        ("{\n", "line 1 is not a problem"),
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


def test_formulas_are_compared_as_mathematics() -> None:
    asked: list[tuple[str, str]] = []

    def compare(expected: str, given: str) -> bool:
        asked.append((expected, given))
        return True

    assert is_correct(r"\boxed{2^{10}}", "1024", compare)
    assert is_correct(r"So \(x^2 + 1\) is it.", r"1+x^2", compare)
    assert asked == [("1024", "2^{10}"), ("1+x^2", "x^2 + 1")]
    assert [kind_of(text) for text in (r"\frac{\pi}{2}", "(1, 2)", "x^2", r"\text{Evelyn}")] == ["mathematics"] * 4
    is_unknown = is_correct(r"\boxed{2^{10}}", "1024", lambda expected, given: None) is None
    assert is_unknown, "it is not scored, and not scored as wrong"


def test_missing_math_verify_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert is_correct(r"\boxed{2^{10}}", "1024") is None
    assert is_correct("It is 1024.", "1024") is True
    with pytest.raises(MissingExtraError, match="bench"):
        compare([("x", None)])


def test_mathematics_is_compared_in_a_process_with_bounds() -> None:
    pairs = [
        ("1024", "2^{10}"),
        (r"\frac{\pi}{2}", r"\frac{1}{2}\pi"),
        ("x^2+1", "1+x^2"),
        ("3", r"\sqrt{16}"),
        ("5", "5x"),
        ("5", None),
        ("", None),
    ]
    assert compare(pairs) == [True, True, True, False, False, True, False]
    assert compare([("1", "9^{9^{9^{9}}}")], cpu_seconds=1) == [None]


def test_answer_that_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"question": "a", "answer": "3"}\n{"question": "b", "answer": "the red one"}\n')
    with pytest.raises(ConfigurationError, match=r"line 2: the answer 'the red one' is not a number"):
        read_problems(file)
