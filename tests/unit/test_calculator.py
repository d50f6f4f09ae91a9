from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.calculator import calculate, calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("24 * 18 * 0.45", "194.4"),
        ("0.1 + 0.2", "0.3"),
        ("1,200 + 3", "1203"),
        ("20% * 50", "10"),
        ("7 % 3", "1"),
        ("2^10", "1024"),
        ("10 / 4", "2.5"),
        ("10/3", "3.33333333333333"),
        ("sqrt(16) + max(1, 2)", "6"),
        ("sqrt(2)", "1.4142135623731"),
        ("5 × 3 =", "15"),
        ("-3 + 5", "2"),
        ("$12.80 * 2", "25.6"),
        ("$1,200 * 2", "2400"),
        ("$150 / 3 + $60000", "60050"),
        ("max($12.80, 2)", "12.8"),
        ("max(1,000, 2)", "1000"),
        ("min(12,345,000, 2)", "2"),
        ("max(100,200)", "200"),
        ("round(2.567, 2)", "2.57"),
        ("1e3", "1000"),
    ],
)
def test_results_of_expressions(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    ["", "(1 + 2", "1 / 0", "9**9**9", "2**100000", "__import__('os')", "a + 1", "'a' * 3", "[1]", "sqrt(-1)",
     "1 if 1 else 2", "print(1)", "(1).real", "1" * 2000, "max()", "True + 1", "abs(1, 2)", "5 % 0"],
)  # fmt: skip
def test_input_that_is_not_arithmetic_raises_a_value_error(expression: str) -> None:
    message = "arithmetic|by zero|power is too large|no real square root|longer than 1000|too few or too many"
    with pytest.raises(ValueError, match=message):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%^() ,emaxsqrt", max_size=30))
def test_arbitrary_input_raises_only_value_errors(expression: str) -> None:
    with contextlib.suppress(ValueError):
        assert calculate(expression)


@pytest.mark.parametrize(
    ("expression", "names"),
    [("SELECT sum(price) FROM items", "SELECT, sum, price, FROM, items"), ("f(3)", "f"), ("12 EUR * 2e3", "EUR")],
)
def test_unknown_words_are_named_with_what_to_do(expression: str, names: str) -> None:
    with pytest.raises(ValueError, match=rf"does not know {names}\. Fetch the values first") as caught:
        calculate(expression)
    assert "Functions are abs, ceil" in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "reference"),
    [("$1 * 12", "$1"), ("12 * $2", "$2"), ("${1} + 1", "${1}"), ("max($1,200)", "$1"), ("round($3,2)", "$3"),
     ("$1, 2", "$1"), ("#E1 * 2", "#E1"), ("12 #1 * 3", "#1"), ("($10 + $12) / 2", "$10"), ("$01", "$01")],
)  # fmt: skip
def test_a_reference_that_nothing_has_replaced_is_no_amount_of_money(expression: str, reference: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reference)} was not replaced by an earlier result"):
        calculate(expression)


def test_tool_returns_errors_to_the_model() -> None:
    assert calculator.invoke({"expression": "2 + 3"}) == "5"
    message = calculator.invoke({"name": "calculator", "args": {"expression": "1/0"}, "id": "1", "type": "tool_call"})
    assert message.status == "error"
    assert "divides by zero" in message.text
