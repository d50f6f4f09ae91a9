"""How libraries for units and mathematics would judge the results of two steps, beside this package's own check.

    pip install quantulum3 pint math-verify
    python docs/measurements/results_libraries.py docs/pairs/pairs-int8-gsm8k-400.jsonl.xz

A verdict is whether two steps come to different results. It is right where it passes a pair that changes nothing, or
stops one that does. Models seldom mistake a unit or an operator in steps whose numbers agree, so each of the target's
steps is also held against itself with a unit or an operator changed, and against itself spelled otherwise.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pint
from math_verify import parse, verify
from quantulum3 import parser

from lookahead_agent.calibration.pairs import labelled_pairs, pair_file
from lookahead_agent.verifiers import results
from lookahead_agent.verifiers.results import _NUMBER, different_results, normalized, numbers

logging.disable(logging.WARNING)  # what a library cannot read it says for each pair
REGISTRY = pint.UnitRegistry()


def ours(draft: str, target: str) -> bool:
    """Numbers, units and equations."""
    return different_results(draft, target) is not None


def our_numbers(draft: str, target: str) -> bool:
    """Numbers alone."""
    return numbers(draft) != numbers(target)


def our_numbers_and_units(draft: str, target: str) -> bool:
    """Without the equations."""
    return our_numbers(draft, target) or results._contradict(results._units(draft), results._units(target))


def with_pint(draft: str, target: str) -> bool:
    """Our numbers; a unit is what pint knows by the word after a number."""
    return our_numbers(draft, target) or results._contradict(_pint_units(draft), _pint_units(target))


def _pint_units(text: str) -> dict[object, set[object]]:
    found: dict[object, set[object]] = {}
    text = normalized(text)
    for match in _NUMBER.finditer(text):
        after = results._UNIT_AFTER.match(text, match.end())
        if after is None:
            continue
        try:
            unit = str(REGISTRY.parse_units(after[1].lower()))
        except Exception:  # pint raises many kinds for a word that is no unit
            continue
        found.setdefault(match["digits"].replace(",", ""), set()).add(unit)
    return found


def with_quantulum(draft: str, target: str) -> bool:
    """Quantities with their units, as quantulum3 finds them."""
    return _quantities(draft) != _quantities(target)


def _quantities(text: str) -> set[tuple[float, str]]:
    return {(quantity.value, quantity.unit.name) for quantity in parser.parse(text)}


def with_math_verify(draft: str, target: str) -> bool:
    """What the steps end with, as math-verify reads and compares it."""
    return not verify(parse(target), parse(draft))


def both_numbers_and_math_verify(draft: str, target: str) -> bool:
    """Our numbers, and math-verify instead of our equations."""
    return our_numbers(draft, target) or with_math_verify(draft, target)


_OTHER_UNIT = {
    "hour": "minute", "minute": "hour", "day": "week", "week": "day", "month": "year", "year": "month",
    "mile": "kilometer", "kilometer": "mile", "gram": "kilogram", "ounce": "pound", "pound": "ounce", "inch": "foot",
    "meter": "centimeter", "liter": "milliliter", "gallon": "liter", "dollar": "euro", "cent": "dollar",
}  # fmt: skip
_UNIT = re.compile(rf"(?<=\d )({'|'.join(_OTHER_UNIT)})(s?)\b")
_OPERATOR = re.compile(r"(?<=\d )(?:\\times|[*×+-])(?= \$?\d)")


def other_unit(text: str) -> str:
    """The first unit after a number is another."""
    return _UNIT.sub(lambda match: _OTHER_UNIT[match[1]] + match[2], text, count=1)


def other_operator(text: str) -> str:
    """The first operator between numbers is another."""
    return _OPERATOR.sub(lambda match: "*" if match[0] in "+-" else "+", text, count=1)


def other_spelling(text: str) -> str:
    """The same in other signs."""
    text = re.sub(r"(?<!\\)\$(\d+(?:\.\d+)?)(?![\d.,]*\d)", r"\1 dollars", text)
    return re.sub(r"\b(\d)(\d{3})\b(?!\.)", r"\1,\2", re.sub(r"\\times|×", "*", text))


def share(verdict: Callable[[str, str], bool], pairs: list[tuple[str, str]]) -> str:
    """How many pairs are stopped."""
    stopped = 0
    for pair in pairs:
        try:
            stopped += verdict(*pair)
        except Exception:
            stopped += 1
    return f"{stopped} of {len(pairs)}"


def measure(name: str, verdict: Callable[[str, str], bool], pairs: list[tuple[str, str, bool]]) -> None:
    """A row of the table."""
    passed = errors = right = failed = 0
    seconds = []
    for draft, target, is_error in pairs:
        begun = time.perf_counter()
        try:
            different = verdict(draft, target)
        except Exception:
            different, failed = True, failed + 1
        seconds.append(time.perf_counter() - begun)
        passed += not different
        errors += not different and is_error
        right += different == is_error
    changed = [
        share(verdict, [(target, other) for _, target, _ in pairs if (other := change(target)) != target])
        for change in (other_unit, other_operator, other_spelling)
    ]
    stated = f"{name} ({failed} pairs raise)" if failed else name
    print(f"| {stated} | {right} | {passed} | {errors} | {' | '.join(changed)} | {1e6 * median(seconds):,.0f} |")


if __name__ == "__main__":
    labelled = []
    for pair in labelled_pairs(pair_file(Path(sys.argv[1])).rows).values():
        is_error = pair.changes_outcome
        if is_error is not None:
            labelled.append((pair.row.pair.draft.text, pair.row.pair.target.text, is_error))
    print(f"{len(labelled)} pairs, {sum(is_error for *_, is_error in labelled)} errors")
    print(
        "| check | right verdicts | passes | errors among them | other unit: stopped | other operator: stopped ",
        end="",
    )
    print("| other spelling: stopped | µs a pair |\n|---|---|---|---|---|---|---|---|")
    for name, verdict in {
        "numbers": our_numbers,
        "numbers and units": our_numbers_and_units,
        "numbers, units, equations (ours)": ours,
        "numbers; units by pint": with_pint,
        "quantities by quantulum3": with_quantulum,
        "the end by math-verify": with_math_verify,
        "numbers, and the end by math-verify": both_numbers_and_math_verify,
    }.items():
        numbers.cache_clear()
        measure(name, verdict, labelled)
