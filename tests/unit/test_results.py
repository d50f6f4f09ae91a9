"""`different_results` compares the numbers, units and equations of two steps."""

from __future__ import annotations

import pytest

from lookahead_agent.verifiers.results import different_results

EQUIVALENT = [
    ("It costs $1,250.50.", "The price is 1250.5 dollars."),
    ("That is 12 dollars.", "That is $12."),
    ("\\frac{3}{4} of 8 is 6", "3/4 of 8 is 6"),
    ("\\dfrac{3}{4}", "\\frac 3 4"),
    ("He runs 5 km.", "He runs 5 kilometres."),
    ("He runs 5 km.", "He runs 5."),
    ("12 × 5 = 60", "5 \\times 12 = 60"),
    ("12 * 5 = 60", "Twelve (12) by 5 gives 60."),
    ("3 + 4 + 5 = 12", "5 + 3 + 4 = 12"),
    ("20\\% of 50 is 10", "20 percent of 50 is 10"),
    ("x + 2 = 5", "2 + x = 5"),
    ("10 ÷ 2 = 5", "10 / 2 = 5"),
    ("1\\,000 m", "1000 metres"),
    ("12 x 5 = 60", "12 · 5 = 60"),
    ("- 5 apples\n- 3 pears", "* 5 apples\n* 3 pears"),
    ("12 apples - 5 is 7", "12 apples minus 5 is 7"),
    ("1. We have 3 apples.", "Step 2: We have 3 apples."),
]
NUMBERS = [
    ("It is 12.", "It is 13."),
    ("It is -5.", "It is 5."),
    ("It is 0.5.", "It is 0.05."),
    ("It is 20%.", "It is 20."),
    ("It is 20 percent.", "It is 20."),
    ("It is 1,000.", "It is 1.000."),
    ("\\frac{3}{4}", "\\frac{4}{5}"),
    ("It is 3.", "It is three."),
]
UNITS = [
    ("It takes 5 minutes.", "It takes 5 hours."),
    ("He runs 5 km.", "He runs 5 miles."),
    ("It costs $5.", "It costs 5 cents."),
    ("It costs €5.", "It costs $5."),
    ("It weighs 3 kg.", "It weighs 3 g."),
    ("5 \\text{ cm} long", "5 \\text{ m} long"),
]
EQUATIONS = [
    ("12 + 5 = 60", "12 × 5 = 60"),
    ("10 - 4 = 6", "10 / 4 = 6"),
    ("10 - 4 = 6", "4 - 10 = 6"),
    ("x + 2 = 5", "x - 2 = 5"),
    ("\\(8 \\div 2 = 4\\)", "\\(2 \\div 8 = 4\\)"),
]


@pytest.mark.parametrize(("first", "second"), EQUIVALENT)
def test_equivalent_results_have_no_difference(first: str, second: str) -> None:
    assert different_results(first, second) is None
    assert different_results(second, first) is None


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (*pair, kind)
        for kind, pairs in (("numbers", NUMBERS), ("units", UNITS), ("equations", EQUATIONS))
        for pair in pairs
    ],
)
def test_different_results_name_the_kind_of_difference(first: str, second: str, difference: str) -> None:
    assert different_results(first, second) == f"different {difference}"
    assert different_results(second, first) == f"different {difference}"
