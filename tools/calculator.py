"""A calculator for agents: exact arithmetic on an expression, without `eval`."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation, localcontext
from fractions import Fraction

from lookahead_agent.agents.tool_use import make_tool

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
    "round": lambda x, digits=None: _round(x, digits),
    "sqrt": lambda x: _square_root(x),
}
# `$1`, `${1}` or `#E1` for an earlier result; amounts of money have cents, three digits or more, or separators.
_REFERENCE = re.compile(r"\$\{\w+\}|#E?\d+|\$0*[1-9]\d?(?!\w|\.\d|,\d{3}(?!\d))")
_REFERENCE_IN_FUNCTION = re.compile(r"\$0*[1-9]\d?(?!\w|\.\d)")
# A name, but not the exponent of a number.
_WORD = re.compile(r"(?<![\w.])[^\W\d]\w*")
_FUNCTION = re.compile(r"[a-z]\(")
_MAX_NAMED = 8
_MAX_LENGTH = 1000
_MAX_EXPONENT = 1000
# Bits of a numerator or denominator: 3,010 digits, which Python formats at once and divides in less than a millisecond.
_MAX_BITS = 10_000
_DIGITS = 15
# Decimals with more zeros than this after the point are written with an exponent.
_MAX_ZEROS = 30


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression exactly.

    Args:
        expression: Numbers, + - * / // % ** ^ and parentheses, and abs, ceil, floor, max, min, round, sqrt. `×`, `÷`,
            amounts of money (`$12.80`, `$150`), thousands separators and percentages ("20%" is 0.2) are understood.

    Returns:
        The result: whole numbers in full, others as decimals with at most 15 significant digits.

    Raises:
        ValueError: The text is too long or not arithmetic, divides by zero, is too deep, has too large a number, or a
            reference to an earlier result, such as `$1`, that nothing has replaced.
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression is longer than {_MAX_LENGTH} characters")
    in_function = _REFERENCE_IN_FUNCTION.search(expression) if _FUNCTION.search(expression) else None
    if (reference := _REFERENCE.search(expression) or in_function) is not None:
        raise ValueError(
            f"{reference[0][:50]} was not replaced by an earlier result: write the number itself. Write an amount of "
            "money without its sign"
        )
    text = _python_notation(expression)
    if unknown := [word for word in dict.fromkeys(_WORD.findall(text)) if word not in _FUNCTIONS]:
        names = ", ".join(word[:50] for word in unknown[:_MAX_NAMED]) + (", …" if len(unknown) > _MAX_NAMED else "")
        raise ValueError(
            f"only arithmetic on numbers is evaluated: this calculator does not know {names}. Fetch the values first, "
            f"with other tools, and then write them as numbers. Functions are {', '.join(_FUNCTIONS)}"
        )
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):  # ValueError: a null byte
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    except (RecursionError, MemoryError):  # the parser's errors for deep nesting
        raise ValueError("the expression is nested too deeply") from None
    try:
        return _decimal(_Evaluator(text).value(tree.body))
    except ZeroDivisionError:
        raise ValueError(f"{expression!r} divides by zero") from None
    except RecursionError:
        raise ValueError("the expression is nested too deeply") from None
    except OverflowError:
        raise ValueError("a number is too large") from None
    except TypeError:
        raise ValueError(f"{expression!r} cannot be evaluated: a function has too few or too many numbers") from None


@make_tool(rest="calculate with smaller numbers", read_only=True)
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression of numbers exactly."""
    return calculate(expression)


def _python_notation(expression: str) -> str:
    text = expression.strip().rstrip("=").strip()
    for symbol, python in (("×", "*"), ("÷", "/"), ("−", "-"), ("^", "**"), ("$", ""), ("€", "")):
        text = text.replace(symbol, python)
    # A comma between digit groups is a thousands separator, but not inside a function's arguments.
    if not _FUNCTION.search(text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    else:
        text = re.sub(r"(?<=\d),(?=(?:\d{3},)*0\d\d(?!\d))", "", text)  # 1,000: no number begins with a zero
    return re.sub(r"(\d+(?:\.\d+)?)\s*%(?!\s*[\d(.])", r"(\1/100)", text)


class _Evaluator:
    """Evaluates the syntax tree of an expression."""

    def __init__(self, text: str) -> None:
        self._text = text

    def value(self, node: ast.expr) -> Fraction:
        """Evaluate a node of the tree."""
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return _check_size(self._exact_decimal(node) if isinstance(number, float) else Fraction(number))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.value(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return _power(self.value(left), self.value(right))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _check_size(_OPERATORS[type(op)](self.value(left), self.value(right)))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
                return _check_size(Fraction(_FUNCTIONS[name](*map(self.value, arguments))))
        raise ValueError(f"only arithmetic is evaluated, not {ast.get_source_segment(self._text, node)!r}")

    def _exact_decimal(self, node: ast.Constant) -> Fraction:
        """Read a decimal literal exactly: 0.1 is one tenth, not the nearest binary fraction."""
        try:
            number = Decimal((ast.get_source_segment(self._text, node) or "").replace("_", ""))
        except InvalidOperation:  # its exponent is out of range
            raise ValueError("a number is too large or too small") from None
        if number and abs(number.adjusted()) > _MAX_EXPONENT:
            raise ValueError(f"a number is too {'large' if number.adjusted() > 0 else 'small'}")
        return Fraction(number)


def _round(value: Fraction, digits: Fraction | None) -> Fraction:
    if digits is None:
        return Fraction(round(value))
    if digits.denominator != 1 or abs(digits) > _MAX_EXPONENT:
        raise ValueError(f"numbers are rounded to a whole number of digits, at most {_MAX_EXPONENT}")
    return Fraction(round(value, int(digits)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(exponent) > _MAX_EXPONENT or _bits(base) * abs(exponent) > _MAX_BITS:
        raise ValueError("the power is too large")
    if exponent == Fraction(1, 2):
        return _square_root(base)
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a negative number has no real power with a fractional exponent")
        return _from_float(float(base) ** float(exponent))
    return base ** int(exponent)


def _square_root(value: Fraction) -> Fraction:
    if value < 0:
        raise ValueError("a negative number has no real square root")
    exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return exact if exact * exact == value else _from_float(math.sqrt(value))


def _from_float(value: float) -> Fraction:
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return Fraction(str(value))


def _check_size(value: Fraction) -> Fraction:
    if _bits(value) > _MAX_BITS:
        raise ValueError("a number is too large, or has too many digits")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _decimal(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = _DIGITS
        result = (Decimal(value.numerator) / Decimal(value.denominator)).normalize()
    return f"{result:f}" if result.adjusted() >= -_MAX_ZEROS else f"{result:E}"
