"""Detection of false equations in steps."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.verifiers.arithmetic import false_equations


@pytest.mark.parametrize(
    "text",
    [
        "9 * $2 = $18",
        "16 - 3 - 4 = 9 eggs",
        "10/3 = 3.33, so 10/3 ≈ 3.34 and 10/3 = 4",
        r"\( \frac{1}{2} \times 10 = 5 \)",
        "2. 3 + 4 = 7\n3. 7 - 1 = 6",
        "$5.00 + $2.50 = $7.5",
        "(3 + 4) * 2 = 14.",
        "1,000 + 200 = 1,200",
        "7 - -2 = 9",
        r"\frac{27 \times 8}{8 \times 8} = \frac{27}{8}",
        r"\frac12 + \frac1{4} = 0.75 and \frac{\frac{1}{2}}{4} = 0.125",
    ],
)
def test_true_equations_are_not_reported(text: str) -> None:
    assert false_equations(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "2x + 3 = 8",
        "x - 3 = 5",
        "half of 10 + 5 = 10",
        "total * 3 = 12",
        "20% * 50 = 11",
        "f(2) = 4",
        "2^3 = 9",
        "5 = 3 times 2",
        "f' + 3 = 5",
        "(a + b)' - 3 + 4 = 2",
        "He has 3 apples + 4 pears = 8",
        "= 5",
        "1 / 0 = 2",
        "(" * 500 + "1 + 1 = 3",
    ],
)
def test_equations_that_are_not_plain_arithmetic_are_ignored(text: str) -> None:
    assert false_equations(text) == []


@pytest.mark.parametrize(
    ("text", "equation"),
    [
        ("9 * 2 = 19", "9 * 2 = 19"),
        ("12 × 5/6 = 6", "12 * 5/6 = 6"),
        (r"\[ 5 \times 3 = 16 \]", "5 * 3 = 16"),
        ("5 = 2 + 4", "5 = 2 + 4"),
        ("y = 2 + 3 = 6", "2 + 3 = 6"),
        ("He has 3 + 4 = 8 apples", "3 + 4 = 8"),
        ("-3 + 4 = 2", "-3 + 4 = 2"),
        ("So: 3 + 4 = 8", "3 + 4 = 8"),
        ("1,000 + 200 = 1,300", "1000 + 200 = 1300"),
        ("10 / 4 = 3.5", "10 / 4 = 3.5"),
        (r"\frac{\$680}{3} = \$220", "((680) / (3)) = 220"),
        (r"\frac{1 + 2}{3} = 2", "((1 + 2) / (3)) = 2"),
    ],
)
def test_false_equations_are_reported(text: str, equation: str) -> None:
    assert false_equations(text) == [equation]


@given(st.integers(-999, 999), st.integers(1, 999), st.sampled_from("+-*/"), st.integers(0, 4))
def test_every_rounding_holds_and_larger_deviations_are_false(
    first: int, second: int, sign: str, decimals: int
) -> None:
    value = {"+": first + second, "-": first - second, "*": first * second, "/": Fraction(first, second)}[sign]
    rounded = f"{float(value):.{decimals}f}" if sign == "/" else str(value)
    assert false_equations(f"{first} {sign} {second} = {rounded}") == []
    wrong = f"{float(value) + 10.0**-decimals * 2:.{decimals}f}" if sign == "/" else str(value + 1)
    assert len(false_equations(f"{first} {sign} {second} = {wrong}")) == 1
