"""The results of a step: steps with other numbers, units or equations never mean the same.

`PrefilterVerifier` compares them before another verifier judges the pair.
"""

import re
from collections import defaultdict
from fractions import Fraction
from functools import lru_cache

from lookahead_agent.decoding.foreign import call_part
from lookahead_agent.decoding.verifier import PartialStep, StepPair, Verdict, Verifier
from lookahead_agent.verifiers.arithmetic import false_only_in, normalize, plain_arithmetic

_NUMBER = re.compile(
    r"""
    (?P<sign>                                     # a sign, where it cannot be a subtraction
        (?<![\w)\]}%.]) (?<![\w)\]}%]\s) [-−–] \s?
      | (?<=[A-Za-z]\s) (?<!\b[A-Za-z]\s) [-−–] (?=[$€£.\d])
    )?
    (?P<currency> [$€£] )? \s?
    (?P<digits> \d{1,3}(?:,\d{3})+(?:\.\d+)? | \d+(?:\.\d+)? | (?<!\d)\.\d+ )
    (?: \s? (?P<percent> \\?% | percent\b ) )?
    """,
    re.VERBOSE,
)
# pint, quantulum3 and math-verify are not more accurate here: docs/results/verifiers.md has the figures.
_UNITS = {
    alias: unit
    for unit, aliases in {
        "dollar": "$ dollar dollars usd",
        "euro": "€ euro euros eur",
        "pound sterling": "£ gbp",
        "cent": "¢ cent cents",
        "second": "s sec secs second seconds",
        "minute": "min mins minute minutes",
        "hour": "h hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "month": "month months",
        "year": "year years",
        "millimetre": "mm millimeter millimeters millimetre millimetres",
        "centimetre": "cm centimeter centimeters centimetre centimetres",
        "metre": "m meter meters metre metres",
        "kilometre": "km kilometer kilometers kilometre kilometres",
        "inch": "inch inches",
        "foot": "ft foot feet",
        "yard": "yd yards yard",
        "mile": "mi mile miles",
        "milligram": "mg milligram milligrams",
        "gram": "g gram grams",
        "kilogram": "kg kilogram kilograms",
        "ounce": "oz ounce ounces",
        "pound": "lb lbs pound pounds",
        "millilitre": "ml milliliter milliliters millilitre millilitres",
        "litre": "l liter liters litre litres",
        "gallon": "gallon gallons",
        "mile per hour": "mph",
        "degree": "° degree degrees",
    }.items()
    for alias in aliases.split()
}
_UNIT_AFTER = re.compile(r"[\s~]*(?:\\(?:text|mathrm)\{\s*)?([A-Za-z]+|[€£¢°])")

_ATOM = r"(?:\d+(?:\.\d+)?|\.\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))"
_EQUATION = re.compile(rf"{_ATOM}(?:\s*[-+*/^=]\s*{_ATOM})+")


@lru_cache(maxsize=1024)
def numbers(text: str) -> frozenset[Fraction | str]:
    """The distinct numbers in `text` by value, without list enumerators ("2.", "Step 3:").

    Thousands separators, currency signs, trailing zeros and LaTeX fractions make no difference. The sign does, and a
    percentage differs from the bare number.
    """
    return frozenset(_by_span(text).values())


def _by_span(text: str) -> dict[tuple[int, int], Fraction | str]:
    """The numbers by their span (begin, end) in the normalized text."""
    found: dict[tuple[int, int], Fraction | str] = {}
    for match in _NUMBER.finditer(normalize(text)):
        value = Fraction(match["digits"].replace(",", ""))
        if match["sign"]:
            value = -value
        found[match.span()] = f"{value}%" if match["percent"] else value
    return found


def numbers_so_far(text: str) -> frozenset[Fraction | str]:
    """The numbers that `text` has now and keeps however it continues.

    The last word may continue ("1" to "12"), and the word before may become a percentage or half of an expression. Both
    are left out, and so is a number that the words after it change.
    """
    settled = re.search(r"^(.*\s)\S+\s+\S+\s+\S*\Z", text, re.DOTALL)
    if settled is None:
        return frozenset()
    # Compared by span: a value that changes may occur again later, where it is not settled.
    return frozenset(value for _, value in _by_span(settled[1]).items() & _by_span(text).items())


def different_results(draft: str, target: str) -> str | None:
    """The difference ("different numbers", "different units", "different equations"); None if there is none.

    A unit or an equation that only one step has is not a difference.
    """
    if numbers(draft) != numbers(target):
        return "different numbers"
    if _contradict(_units(draft), _units(target)):
        return "different units"
    if _contradict(_equations(draft), _equations(target)):
        return "different equations"
    return None


def _contradict(first: dict[object, set[object]], second: dict[object, set[object]]) -> bool:
    """Whether both have values for one key, and none in common."""
    return any(not first[key] & second[key] for key in first.keys() & second.keys())


def _units(text: str) -> dict[object, set[object]]:
    found: dict[object, set[object]] = defaultdict(set)
    text = normalize(text)
    for match in _NUMBER.finditer(text):
        value = Fraction(match["digits"].replace(",", ""))
        after = _UNIT_AFTER.match(text, match.end())
        for name in (match["currency"], after[1] if after else None):
            unit = _UNITS.get(name) or _UNITS.get(name.lower()) if name else None
            if unit is not None:
                found[value].add(unit)
    return found


def _equations(text: str) -> dict[object, set[object]]:
    """The arithmetic in the text: its operators, by its operands."""
    text = re.sub(r"[()]", "", plain_arithmetic(text))
    found: dict[object, set[object]] = defaultdict(set)
    for match in _EQUATION.finditer(text):
        atoms = tuple(_value(atom) for atom in re.findall(_ATOM, match[0]))
        operators = tuple(re.findall(r"[-+*/^=]", match[0]))
        # With only commutative operators, the order of the terms does not matter.
        free = set(operators) <= {"+", "*", "="}
        found[tuple(sorted(atoms, key=str))].add(tuple(sorted(operators)) if free else (atoms, operators))
    return found


def _value(atom: str) -> Fraction | str:
    return atom if atom.isalpha() else Fraction(atom)


def rejection(draft: str, target: str) -> str | None:
    """The reason to reject a pair without a model; None: there is none."""
    return different_results(draft, target) or ("false arithmetic" if false_only_in(draft, target) else None)


class PrefilterVerifier:
    """Accepts equal texts, rejects different results or false arithmetic, and passes other pairs to a verifier.

    A small judge is far too lenient about numbers, and an embedding hardly distinguishes them. `same_results` compares
    numbers, units and equations, and checks the draft's arithmetic.
    """

    def __init__(self, verifier: Verifier, *, same_results: bool = True) -> None:
        self._verifier = verifier
        self._same_results = same_results

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        draft, target = pair.draft.text.strip(), pair.target.text.strip()
        if draft == target:
            return Verdict(True, "same text")
        if self._same_results and (reason := rejection(draft, target)) is not None:
            return Verdict(False, reason)
        return await call_part(self._verifier, lambda: self._verifier.verify(pair))

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        """Whether the target's step has a number that the draft's complete step lacks."""
        return self._same_results and draft.complete and not numbers_so_far(target.text) <= numbers(draft.text)
