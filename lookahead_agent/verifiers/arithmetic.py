"""Arithmetic that a step writes out, checked exactly: "9 * 2 = 19" is false whatever is meant by it."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise

from lookahead_agent.verifiers.results import plain_arithmetic

_RUN = re.compile(r"[-+*/=≈().\d\s%^]*[=≈][-+*/=≈().\d\s%^]*")
_WORD_BEFORE = re.compile(r"([A-Za-z]+)\s*$")
_WORD_AFTER = re.compile(r"\s*([A-Za-z]+)")
# Beside one of these a run of arithmetic is part of a longer expression, of which the rest is in words.
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


def false_equations(text: str) -> list[str]:
    """Equations between numbers in `text` that do not hold.

    Only what is written out in numbers and signs is checked, and only where no word or variable beside it may be part
    of the expression; with a division, the other side may be rounded or cut in its last digit.
    """
    return [equation for equation, holds in _equations(text) if not holds]


def false_only_in(draft: str, target: str) -> list[str]:
    """Equations of the draft's step that do not hold and that the target's step has not."""
    false = false_equations(draft)
    own = false_equations(target) if false else []
    return [equation for equation in false if equation not in own]


def _equations(text: str) -> Iterator[tuple[str, bool]]:
    for line in plain_arithmetic(text).splitlines():
        if "=" not in line and "≈" not in line:
            continue  # the pattern would look from each digit on
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


def _in_words(beside: re.Match[str] | None, edge: str) -> bool:
    """Whether the word beside arithmetic that has this edge is part of the expression."""
    if beside is None:
        return False
    word = beside[1]
    touches = beside[0] == word and not edge.isspace()
    return touches or len(word) == 1 or word.lower() in _OPERATOR_WORDS


def _has_operator(side: str) -> bool:
    return re.search(r"[\d)]\s*[-+*/]", side) is not None


def _value(side: str) -> Fraction | None:
    """The value of a side; None if it is no complete expression in numbers."""
    side = side.strip().rstrip(".")
    if not side or "%" in side or "^" in side or "**" in side or "//" in side:
        return None
    try:
        return _evaluated(ast.parse(re.sub(r"(?<![\d.])0+(?=\d)", "", side), mode="eval").body, side)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _evaluated(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand, source)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_evaluated(left, source), _evaluated(right, source))
    raise ValueError(f"{source} is no arithmetic")


def _same(left: str, right: str, first: Fraction, second: Fraction) -> bool:
    if first == second:
        return True
    if "/" not in left + right:
        return False
    plain = right if not _has_operator(right) else left
    # Rounded or cut, it is less than one of its last digit away.
    _, _, decimals = plain.strip().rstrip(".").partition(".")
    return abs(first - second) < Fraction(1, 10 ** len(decimals.strip()))
