from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.verifiers.results import numbers, numbers_so_far


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("12 × 5/6 = 6", "12 × 5/6 = 10"),
        ("x = 2", "x = -2"),
        ("10% of it", "10 of it"),
        ("it is 1.5", "it is 15"),
        ("it is 1,500", "it is 1.500"),
        (r"\frac{3}{4}", r"\frac{3}{5}"),
        ("profit of $452.50", "profit of $452.05"),
        ("3 apples", "apples"),
        ("(-4) apples", "4 apples"),
    ],
)
def test_texts_with_different_values_or_units_have_different_numbers(first: str, second: str) -> None:
    assert numbers(first) != numbers(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("12 × 5/6 = 10", "so 10 = 5/6 × 12"),
        ("$1,200.50", "1200.5 dollars"),
        (r"\frac{3}{4}", "3/4"),
        (r"\frac12", "1/2"),
        (r"\frac{27 \times 8}{3}", "27 × 8 / 3"),
        (r"10\%", "10 %"),
        ("10{,}000", "10,000"),
        ("5-3=2", "5 - 3 = 2"),
        ("1. First, 4 trays.\n2. Then sum.", "4 trays. Then the sum."),
        ("Step 2: add 7", "add 7"),
        ("**Step 3:** add 7", "add 7"),
        (".5", "0.50"),
    ],
)
def test_numbers_ignore_notation_order_and_step_labels(first: str, second: str) -> None:
    assert numbers(first) == numbers(second)


@given(st.decimals(min_value=0, max_value=10**9, places=2), st.decimals(min_value=0, max_value=10**9, places=2))
def test_numbers_are_equal_if_and_only_if_their_values_are(first: object, second: object) -> None:
    assert (numbers(f"it is {first:,} km") == numbers(f"that makes {second} km")) == (first == second)


PIECES = [
    "12",
    "1,200",
    "0.5",
    ".5",
    "%",
    " ",
    "\n",
    "- ",
    "-3",
    "$",
    "\\$4",
    r"\frac{3}{4}",
    "1. ",
    "2) ",
    "Step 3: ",
    "Step",
    "percent",
    "\\%",
    "\\frac",
    "{",
    "}",
    ",",
    "*",
    "\t",
    "x",
    " = ",
]


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.sampled_from(PIECES), max_size=4))
def test_numbers_so_far_are_among_the_numbers_of_the_whole_text(beginning: list[str], rest: list[str]) -> None:
    text = "".join(beginning)
    for length in range(len(text) + 1):
        assert numbers_so_far(text[:length]) <= numbers(text + "".join(rest))


@pytest.mark.parametrize("text", ["12 %Step 3: 1212", "12 percent = 12 12", "- 3 x 3 3"])
def test_unfinished_number_is_not_settled_by_another_one_of_its_value(text: str) -> None:
    for length in range(len(text) + 1):
        assert numbers_so_far(text[:length]) <= numbers(text)


def test_numbers_so_far_leave_out_the_last_number() -> None:
    assert numbers_so_far("It takes 12 boxes and then 7") == {12}
