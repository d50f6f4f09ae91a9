"""A calculator for agents: exact arithmetic on an expression, without `eval`."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

from langchain_core.tools import ToolException, tool

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "abs": abs,
    "ceil": lambda x: Fraction(math.ceil(x)),
    "floor": lambda x: Fraction(math.floor(x)),
    "max": max,
    "min": min,
    "round": lambda x, digits=Fraction(0): Fraction(round(x, int(digits))),
    "sqrt": lambda x: _square_root(x),
}
_LONGEST = 1000
_LARGEST_EXPONENT = 1000
_LARGEST_BITS = 20_000
_DIGITS = 15


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression exactly.

    Args:
        expression: Numbers, + - * / // % ** ^ and parentheses, and abs, ceil, floor, max, min, round, sqrt. `×`, `÷`,
            `$`, thousands separators and percentages ("20%" is 0.2) are understood.

    Returns:
        The result in decimals, to 15 significant digits where it has no end.

    Raises:
        ValueError: It is not arithmetic, divides by zero, or its result is too large.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression is longer than {_LONGEST} characters")
    try:
        tree = ast.parse(_python_notation(expression), mode="eval")
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    try:
        return _decimal(_value(tree.body))
    except ZeroDivisionError:
        raise ValueError(f"{expression!r} divides by zero") from None
    except (TypeError, RecursionError):
        raise ValueError(f"{expression!r} cannot be evaluated") from None


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression exactly, for example "(3 + 4) * 2.5"."""
    try:
        return calculate(expression)
    except ValueError as error:
        raise ToolException(str(error)) from error


calculator.handle_tool_error = True


def _python_notation(expression: str) -> str:
    text = expression.strip().rstrip("=").strip()
    for sign, python in (("×", "*"), ("÷", "/"), ("−", "-"), ("^", "**"), ("$", ""), ("€", "")):
        text = text.replace(sign, python)
    # A comma between digit groups is a thousands separator, but not inside a function's arguments.
    if not re.search(r"[a-z]\(", text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"(\d+(?:\.\d+)?)\s*%(?!\s*[\d(.])", r"(\1/100)", text)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            # Through text, so that 0.1 is one tenth and not the nearest binary fraction.
            return Fraction(str(number)) if isinstance(number, float) else Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return Fraction(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"only arithmetic is evaluated, not {ast.unparse(node)!r}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(exponent) > _LARGEST_EXPONENT or _bits(base) * abs(exponent) > _LARGEST_BITS:
        raise ValueError("the power is too large")
    if exponent == Fraction(1, 2):
        return _square_root(base)
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a negative number has no real power with a fractional exponent")
        return Fraction(str(float(base) ** float(exponent)))
    return base ** int(exponent)


def _square_root(value: Fraction) -> Fraction:
    if value < 0:
        raise ValueError("a negative number has no real square root")
    exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return exact if exact * exact == value else Fraction(str(math.sqrt(value)))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > _LARGEST_BITS:
        raise ValueError("the result is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _decimal(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = _DIGITS
        return f"{(Decimal(value.numerator) / Decimal(value.denominator)).normalize():f}"
