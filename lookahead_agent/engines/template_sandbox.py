"""Jinja's sandbox for the chat templates of models' folders, with bounds on what one operation makes.

A time-out interrupts a template between two operations of Python, and none within a single one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.nodes import Concat, Dict, List, Tuple
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MAX_PRODUCT = 1 << 20  # product of two numbers, or characters or items of a multiplied text or list
_MAX_VALUES = 250_000  # number of values in a list, values inside included; a shared one counts each time
_MAX_SIZE = 1 << 26  # characters and values of a list, or characters of a text
_MAX_DATE = 1 << 10  # characters of the format of a date
_MAX_BITS = 1 << 10  # bits of a whole number
_METHODS = frozenset(
    {"center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "to_bytes", "translate"}
    | {"zfill"}
)
"""Methods of texts and numbers whose result may be longer than all that they are given."""
_FILTERS = frozenset(
    {"batch", "center", "filesizeformat", "format", "indent", "join", "replace", "round", "slice", "tojson"}
    | {"truncate", "urlize", "wordwrap", "xmlattr"}
)
_OWN_OPTIONS = frozenset({"_loop_vars", "_block_vars"})  # options of calls that Jinja writes itself
_WIDTH = re.compile(r"\*|\d{6,}|\{[^{}]*\{")  # width in a format that is long, or that is another value
_NUMBER = re.compile(r"\d+")


class _Generator(CodeGenerator):
    """Writes a check around each list, tuple and mapping, and into `~`: nested values double with every step."""

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.concat([*map(str, ")
        self.visit(List(node.nodes), frame)
        self.write(")])")

    def visit_List(self, node: List, frame: Frame) -> None:
        self.write("environment.check(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: Dict, frame: Frame) -> None:
        self.write("environment.check(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: Tuple, frame: Frame) -> None:
        if node.ctx != "load":  # the variables of an assignment
            super().visit_Tuple(node, frame)
            return
        self.write("environment.check(")
        super().visit_Tuple(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounded operations, calls and filters; others raise SecurityError."""

    code_generator_class = _Generator
    # Jinja does not compute these when it compiles a template either.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.filters = _Filters(self.filters)

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Join the texts of `~`, of a macro, of a block, or of the whole template."""
        size, parts = 0, []
        for text in texts:
            size += len(text)
            if size > _MAX_SIZE:
                raise SecurityError("a text without a bound")
            parts.append(text)
        return "".join(parts)

    @staticmethod
    def check(value: Any) -> Any:
        """Return a value of bounded size."""
        if not isinstance(value, str):
            _size(value)
        elif len(value) > _MAX_SIZE:
            raise SecurityError("a text without a bound")
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operator; powers are refused."""
        if operator == "**":
            raise SecurityError("an operation without a bound: '**'")
        if operator == "*":
            sizes = [len(value) if isinstance(value, (str, list, tuple)) else value for value in (left, right)]
            if not abs(sizes[0]) * abs(sizes[1]) <= _MAX_PRODUCT:
                raise SecurityError("an operation without a bound: '*'")
        elif operator == "%" and isinstance(left, str):
            _check_product("%", left, [right])
        return self.check(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *arguments: Any, **options: Any) -> Any:
        """Call a function, a macro, or a method."""
        method = getattr(function, "__wrapped__", function)  # Jinja wraps `str.format`
        others = [*arguments, *(value for name, value in options.items() if name not in _OWN_OPTIONS)]
        if isinstance(owner := getattr(method, "__self__", None), (str, bytes, int)) and method.__name__ in _METHODS:
            _check_product(method.__name__, owner, others)
        if getattr(function, "__name__", "") == "strftime_now" and any(len(str(each)) > _MAX_DATE for each in others):
            raise SecurityError("a date without a bound")
        return self.check(super().call(context, function, *arguments, **options))


class _Filters(dict[str, Callable[..., Any]]):
    """Filters with bounded results."""

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        for name, function in filters.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        place = 1 if hasattr(function, "jinja_pass_arg") else 0  # the first argument may be Jinja's context

        @wraps(function)
        def apply(*arguments: Any, **options: Any) -> Any:
            others = [*arguments[place + 1 :], *options.values()]
            if name in _FILTERS and len(arguments) > place:
                _check_product(name, arguments[place], others)
            if name == "sum" and any(isinstance(value, (list, tuple)) for value in others):
                raise SecurityError("an operation without a bound: the sum of lists")
            return BoundedEnvironment.check(function(*arguments, **options))

        super().__setitem__(name, apply)


def _check_product(name: str, value: Any, arguments: Sequence[Any]) -> None:
    """Raise SecurityError if an operation on a value could multiply it beyond the bound."""
    formats = name in ("%", "format", "format_map") and isinstance(value, str)
    size = 1 if isinstance(value, int) else _size(value)
    # A number may be a width, but a format states its widths itself.
    factor = sum((not formats and abs(each)) if isinstance(each, int) else _size(each) for each in arguments)
    widths = sum(map(int, _NUMBER.findall(value))) if formats and not _WIDTH.search(value) else 0
    if (formats and _WIDTH.search(value)) or size * (1 + factor) + widths > _MAX_SIZE:
        raise SecurityError(f"an operation without a bound: {name!r}")


def _size(value: Any) -> int:
    """The characters and values of a value, with those inside; raises SecurityError beyond the bounds."""
    size, count, pending = 0, 0, [value]
    while pending:
        each = pending.pop()
        if isinstance(each, (str, bytes)):
            size += len(each)
        elif isinstance(each, int) and each.bit_length() > _MAX_BITS:
            raise SecurityError("a number without a bound")
        elif isinstance(each, Namespace):
            pending.append(each._Namespace__attrs)
        elif isinstance(each, (dict, list, tuple, set, frozenset)):
            count += len(each)
            if count > _MAX_VALUES:
                break
            pending += each
            if isinstance(each, dict):
                pending += each.values()
        size += 1
        if size > _MAX_SIZE:
            break
    if pending and (count > _MAX_VALUES or size > _MAX_SIZE):
        raise SecurityError("a value without a bound")
    return size
