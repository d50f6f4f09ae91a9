"""The results of a step: steps with other numbers, units or equations never mean the same."""

import re
from collections import defaultdict
from fractions import Fraction
from functools import lru_cache

_ENUMERATOR = re.compile(r"^[ \t>*#-]*(?:step\s+)?\d+[.):](?=\s|\*)", re.IGNORECASE | re.MULTILINE)
_BULLET = re.compile(r"^[ \t]*[-*+•][ \t]+", re.MULTILINE)
# "\frac{1}{12}", and "\frac1{12}" or "\frac12", where one digit needs no braces.
_LATEX_FRACTION = re.compile(r"\\[dt]?frac" + 2 * r"\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))")
_LATEX_NOISE = re.compile(r"\\[,;:! ]|\\left|\\right|\{,\}")
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

_OPERATORS = {r"\\times|\\cdot|[×·∗]|(?<=\d)\s*x\s*(?=\d)": "*", r"\\div|÷": "/", "[−–]": "-"}
_COMPOSED_FRACTION = re.compile(r"\\[dt]?frac" + 2 * r"\s*\{([^{}]*)\}")
_ATOM = r"(?:\d+(?:\.\d+)?|\.\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))"
_EQUATION = re.compile(rf"{_ATOM}(?:\s*[-+*/^=]\s*{_ATOM})+")


def normalize(text: str) -> str:
    """The text without list bullets and enumerators, and with LaTeX numbers in plain notation."""
    text = _ENUMERATOR.sub("", _BULLET.sub("", text))
    text = _LATEX_NOISE.sub(lambda match: "," if match.group() == "{,}" else "", text)
    text = _LATEX_FRACTION.sub(lambda match: f" {match[1] or match[2]} / {match[3] or match[4]} ", text)
    return text.replace("\\$", "$")


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


def plain_arithmetic(text: str) -> str:
    """The text with its arithmetic in plain notation: no LaTeX, currencies, or thousands separators."""
    text = normalize(text)
    for pattern, operator in _OPERATORS.items():
        text = re.sub(pattern, operator, text)
    while (plain := _COMPOSED_FRACTION.sub(r"((\1) / (\2))", text)) != text:  # from the innermost outwards
        text = plain
    return re.sub(r"(?<=\d),(?=\d{3})|\\(?=[()\[\]])|[$€£{}\[\]\\]", "", text)


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
