"""The arithmetic that a step writes out, in plain notation, and exact checks: "9 * 2 = 19" is false in any context."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise

_ENUMERATOR = re.compile(r"^[ \t>*#-]*(?:step\s+)?\d+[.):](?=\s|\*)", re.IGNORECASE | re.MULTILINE)
_BULLET = re.compile(r"^[ \t]*[-*+•][ \t]+", re.MULTILINE)
# "\frac{1}{12}", and "\frac1{12}" or "\frac12", where one digit needs no braces.
_LATEX_FRACTION = re.compile(r"\\[dt]?frac" + 2 * r"\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))")
_LATEX_NOISE = re.compile(r"\\[,;:! ]|\\left|\\right|\{,\}")
_OPERATORS = {r"\\times|\\cdot|[×·∗]|(?<=\d)\s*x\s*(?=\d)": "*", r"\\div|÷": "/", "[−–]": "-"}
_COMPOSED_FRACTION = re.compile(r"\\[dt]?frac" + 2 * r"\s*\{([^{}]*)\}")
_RUN = re.compile(r"[-+*/=≈().\d\s%^]*[=≈][-+*/=≈().\d\s%^]*")
_WORD_BEFORE, _WORD_AFTER = re.compile(r"[A-Za-z]+$"), re.compile(r"[A-Za-z]+")
# Next to one of these, arithmetic is part of a longer expression, and the rest of it is in words.
_OPERATOR_WORDS = frozenset(
    {
        *("of", "times", "plus", "minus", "by", "over", "and", "less", "more", "than", "divided", "multiplied", "mod"),
        *("half", "third", "quarter", "twice", "double", "thrice", "triple", "squared", "cubed", "percent"),
        *("dozen", "hundred", "thousand", "million"),
    }
)
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def normalize(text: str) -> str:
    """The text without list bullets and enumerators, and with LaTeX numbers in plain notation."""
    text = _ENUMERATOR.sub("", _BULLET.sub("", text))
    text = _LATEX_NOISE.sub(lambda match: "," if match.group() == "{,}" else "", text)
    text = _LATEX_FRACTION.sub(lambda match: f" {match[1] or match[2]} / {match[3] or match[4]} ", text)
    return text.replace("\\$", "$")


def plain_arithmetic(text: str) -> str:
    """The text with its arithmetic in plain notation: no LaTeX, currencies, or thousands separators."""
    text = normalize(text)
    for pattern, plain_operator in _OPERATORS.items():
        text = re.sub(pattern, plain_operator, text)
    while (plain := _COMPOSED_FRACTION.sub(r"((\1) / (\2))", text)) != text:  # innermost fractions first
        text = plain
    return re.sub(r"(?<=\d),(?=\d{3})|\\(?=[()\[\]])|[$€£{}\[\]\\]", "", text)


def false_equations(text: str) -> list[str]:
    """The false equations between numbers in `text`.

    Only numbers and signs are checked, and only if no word or variable next to them may belong to the expression. With
    a division, the other side may be rounded or truncated in its last digit.
    """
    return [equation for equation, holds in _equations(text) if not holds]


def false_only_in(draft: str, target: str) -> list[str]:
    """The false equations of the draft step that the target step does not have."""
    draft_false = false_equations(draft)
    target_false = false_equations(target) if draft_false else []
    return [equation for equation in draft_false if equation not in target_false]


def _equations(text: str) -> Iterator[tuple[str, bool]]:
    for line in plain_arithmetic(text).splitlines():
        if "=" not in line and "≈" not in line:
            continue  # saves time: the pattern would be tried from every digit
        for match in _RUN.finditer(line):
            run = match[0]
            sides = re.split("[=≈]", run)
            before, after = line[: match.start()], line[match.end() :]
            if _in_words(_WORD_BEFORE.search(before), run[:1]) or (before.strip() and sides[0].lstrip()[:1] in "+-*/)"):
                sides[0] = ""
            if _in_words(_WORD_AFTER.match(after), run[-1:]):
                sides[-1] = ""
            for left, right in pairwise(sides):
                first, second = _value(left), _value(right)
                if first is not None and second is not None and (_has_operator(left) or _has_operator(right)):
                    yield f"{left.strip()} = {right.strip()}", _same(left, right, first, second)


def _in_words(adjacent: re.Match[str] | None, edge: str) -> bool:
    """Whether the word next to some arithmetic, whose adjacent character is `edge`, belongs to the expression."""
    if adjacent is None:
        return False
    return not edge.isspace() or len(adjacent[0]) == 1 or adjacent[0].lower() in _OPERATOR_WORDS


def _has_operator(side: str) -> bool:
    return re.search(r"[\d)]\s*[-+*/]", side) is not None


def _value(side: str) -> Fraction | None:
    """The exact value of a side; None if it is not a complete expression of numbers."""
    side = side.strip().rstrip(".")
    if not side or "%" in side or "^" in side or "**" in side or "//" in side:
        return None
    try:
        return _evaluate(ast.parse(re.sub(r"(?<![\d.])0+(?=\d)", "", side), mode="eval").body, side)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _evaluate(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, source)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_evaluate(left, source), _evaluate(right, source))
    raise ValueError(f"{source} is not arithmetic")


def _same(left: str, right: str, first: Fraction, second: Fraction) -> bool:
    if first == second:
        return True
    if "/" not in left + right:
        return False
    rounded = right if not _has_operator(right) else left
    # A rounded or truncated value is less than one unit of its last digit away.
    _, _, decimals = rounded.strip().rstrip(".").partition(".")
    return abs(first - second) < Fraction(1, 10 ** len(decimals.strip()))
