"""Whether two steps come to different results: other numbers, other units, other equations."""

from __future__ import annotations

import re
from collections import defaultdict
from fractions import Fraction

from lookahead_agent.verifiers.numbers import NUMBER, normalized, numbers

# pint, quantulum3 and math-verify are no better at this: the figures are in docs/decoder.md, with their script.
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

_OPERATORS = {r"\\times|\\cdot|[×·∗]|(?<=\d)\s*x\s*(?=\d)": "*", r"\\div|÷": "/", "[−–]": "-"}
_COMPOSED_FRACTION = re.compile(r"\\[dt]?frac" + 2 * r"\s*\{([^{}]*)\}")
_ATOM = r"(?:\d+(?:\.\d+)?|\.\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))"
_EQUATION = re.compile(rf"{_ATOM}(?:\s*[-+*/^=]\s*{_ATOM})+")


def different_results(draft: str, target: str) -> str | None:
    """What differs ("different numbers", "different units", "different equations"); None if nothing does.

    A unit that only one side names is no difference, nor an equation that only one side writes out.
    """
    if numbers(draft) != numbers(target):
        return "different numbers"
    if _contradict(_units(draft), _units(target)):
        return "different units"
    if _contradict(_equations(draft), _equations(target)):
        return "different equations"
    return None


def plain_arithmetic(text: str) -> str:
    """The text with its arithmetic in plain signs: no LaTeX, currencies, or thousands separators."""
    text = normalized(text)
    for pattern, operator in _OPERATORS.items():
        text = re.sub(pattern, operator, text)
    while (plain := _COMPOSED_FRACTION.sub(r"((\1) / (\2))", text)) != text:  # from the innermost outwards
        text = plain
    return re.sub(r"(?<=\d),(?=\d{3})|\\(?=[()\[\]])|[$€£{}\[\]\\]", "", text)


def _contradict(first: dict[object, set[object]], second: dict[object, set[object]]) -> bool:
    """Whether both say something about one thing, and nothing in common."""
    return any(not first[key] & second[key] for key in first.keys() & second.keys())


def _units(text: str) -> dict[object, set[object]]:
    """Units named beside each number."""
    found: dict[object, set[object]] = defaultdict(set)
    text = normalized(text)
    for match in NUMBER.finditer(text):
        value = Fraction(match["digits"].replace(",", ""))
        after = _UNIT_AFTER.match(text, match.end())
        for name in (match["currency"], after[1] if after else None):
            unit = _UNITS.get(name) or _UNITS.get(name.lower()) if name else None
            if unit is not None:
                found[value].add(unit)
    return found


def _equations(text: str) -> dict[object, set[object]]:
    """Arithmetic in the text: what is done, by what it is done to."""
    text = re.sub(r"[()]", "", plain_arithmetic(text))
    found: dict[object, set[object]] = defaultdict(set)
    for match in _EQUATION.finditer(text):
        atoms = tuple(_value(atom) for atom in re.findall(_ATOM, match[0]))
        operators = tuple(re.findall(r"[-+*/^=]", match[0]))
        # Where operands change places freely, so may the terms of the text.
        free = set(operators) <= {"+", "*", "="}
        found[tuple(sorted(atoms, key=str))].add(tuple(sorted(operators)) if free else (atoms, operators))
    return found


def _value(atom: str) -> Fraction | str:
    return atom if atom.isalpha() else Fraction(atom)
