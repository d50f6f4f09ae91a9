"""Tool calls as a planner writes them, `name(argument="value", other=[1, null])`, and the schemas of their arguments.

Values are literals of Python or of JSON, and are read exactly. Everything else is an error, after which a model writes
the call.
"""

import json
import math
import re
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, Self

from jsonschema import Draft202012Validator, ValidationError, validators
from langchain_core.tools import BaseTool
from referencing import Registry

from lookahead_agent.agents.tool_schemas import describe_function

_QUOTED = r"""\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''|(?!\"\"\"|''')(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_TOKEN = re.compile(
    rf"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<text>[rRuU]?(?:{_QUOTED}))
    |(?P<unclosed>"|')
    |(?P<reference>\$(?:\{{\d{{1,4}}\}}|\d{{1,4}}(?![\w.])))
    |(?P<number>[-+]?\.?\d[\w.]*(?:(?<=[eE])[-+]\d+)?)
    |(?P<gap>\.\.\.|…|<[^<>\n]*>)
    |(?P<word>[^\W\d]\w*)
    |(?P<open>[(\[{{])|(?P<close>[)\]}}])|(?P<mark>[,:])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|N\{[^{}]*\}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', **dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True))}
_MAX_DEPTH = 64  # levels of objects and lists in a value
_MAX_REFERENCES = 1_000  # references of a schema followed for one call: nested ones multiply
_MAX_PROBLEMS = 5  # wrong arguments that an error names
_MAX_PROBLEM = 300  # characters of each reason


class Token(NamedTuple):
    """A part of a call's text."""

    kind: str  # name of a group of `_TOKEN`
    text: str
    start: int
    end: int

    @property
    def is_long_text(self) -> bool:
        """Whether this is a text in triple quotes, or the beginning of one."""
        return self.kind in ("text", "unclosed") and self.text.lstrip("rRuU").startswith(('"""', "'''"))


def tokens(text: str, at: int) -> Iterator[Token]:
    """Split the text of a call from a place within its brackets; the last token is the closing one or an open quote."""
    depth = 1
    while depth and (match := _TOKEN.match(text, at)) is not None:
        kind, at = str(match.lastgroup), match.end()
        if kind == "unclosed":
            yield Token(kind, text[match.start() :], match.start(), len(text))
            return
        depth += (kind == "open") - (kind == "close")
        yield Token(kind, match[0], match.start(), at)


@dataclass(frozen=True)
class Gap:
    """A value that a call leaves open."""

    text: str


class Arguments(NamedTuple):
    """The arguments of a call as they are written, and where the call ends."""

    positional: list[Any]
    named: dict[str, Any]
    end: int


def read_arguments(text: str, at: int, names: Sequence[str], results: int, *, any_name: bool = False) -> Arguments:
    """Read the arguments of a call, up to its closing bracket.

    Args:
        text: The text of the call.
        at: Place after the opening bracket.
        names: Names of arguments, which may have any characters.
        results: Number of earlier results. `$1` outside of quotes is read as the text "$1", and no higher number is.
        any_name: Whether other identifiers are names as well.

    Raises:
        ValueError: There are no arguments, or not all are literals of Python or JSON. `...` and `<name>` are a `Gap`.
    """
    name_pattern = _name_pattern((*names,), any_name)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        name = name_pattern.match(text, at)
        value, end = _until_separator(text, name.end() if name is not None else at)
        at = end.end
        if value and name is not None:
            if name[1] in named:
                raise ValueError(f"{name[1]} occurs twice")
            named[name[1]] = _literal(value, results)
        elif value:
            if named:
                raise ValueError("a value without a name follows one with a name")
            positional.append(_literal(value, results))
        elif name is not None or end.text == ",":
            raise ValueError("a value is missing")
        if end.text == ")":
            return Arguments(positional, named, at)


@lru_cache(maxsize=256)
def _name_pattern(names: tuple[str, ...], any_name: bool) -> re.Pattern[str]:
    listed = [re.escape(name) for name in sorted(names, key=len, reverse=True)]
    if any_name:
        listed.append(r"[^\W\d][\w.-]*")
    return re.compile(rf"({'|'.join(listed)})\s*=(?!=)" if listed else r"(?!)()")


def _until_separator(text: str, at: int) -> tuple[list[Token], Token]:
    """Return the tokens of a value, and the comma or closing bracket after it."""
    value: list[Token] = []
    depth = 0
    for token in tokens(text, at):
        if depth == 0 and token.text in (",", ")"):
            return value, token
        depth += (token.kind == "open") - (token.kind == "close")
        if token.kind in ("unclosed", "other") or not 0 <= depth <= _MAX_DEPTH:
            raise ValueError(f"{token.text[:20]!r} is not a literal")
        if token.kind != "space":
            value.append(token)
    raise ValueError("the call is not closed")


def _literal(value: list[Token], results: int) -> Any:
    """Return the value of tokens, all of which it takes."""
    # Python's own parser of literals is not safe in several threads before 3.12.
    literal = _Literal(value, results)
    read = literal.value()
    if literal.left:
        raise ValueError(f"{literal.left[-1].text[:20]!r} follows a value")
    return read


class _Literal:
    """Reads one literal from tokens."""

    def __init__(self, value: list[Token], results: int) -> None:
        self.left = value[::-1]
        self._results = results

    def value(self) -> Any:
        token = self._next()
        match token.kind, token.text:
            case "text", text:
                return _text(text)
            case "number", text:
                return _number(text)
            case "reference", text if 0 < int(text.strip("${}")) <= self._results:
                return text
            case "gap", text:
                return Gap(text)
            case "word", text if text in _WORDS:
                return _WORDS[text]
            case "open", "{":
                return dict(self._items("}"))
            case "open", "[":
                return [value for value, _ in self._items("]")]
            case "open", "(":
                values = [value for value, _ in self._items(")")]
                return values if self._has_comma or not values else values[0]
        raise ValueError(f"{token.text[:20]!r} is not a literal")

    def _items(self, end: str) -> list[tuple[Any, Any]]:
        """Read what is between brackets: values, or keys with their values in curly ones."""
        items: dict[Any, tuple[Any, Any]] = {}
        has_comma = False
        while self.left and self.left[-1].text != end:
            if items and not has_comma:
                raise ValueError("a comma is missing")
            key = item = self.value()
            if end == "}":
                if not isinstance(key, str) or _REFERENCE.search(key) or key in items or self._next().text != ":":
                    raise ValueError("an object has texts as keys, each once")
                item = self.value()
            items[key if end == "}" else len(items)] = (key, item) if end == "}" else (item, None)
            if has_comma := bool(self.left) and self.left[-1].text == ",":
                self._next()
        self._next()
        self._has_comma = has_comma or len(items) > 1
        return [*items.values()]

    def _next(self) -> Token:
        if not self.left:
            raise ValueError("a value is missing")
        return self.left.pop()


def _number(text: str) -> int | float:
    try:
        whole = int(text, 0)
    except ValueError:
        if text.lstrip("+-")[:2].isdecimal():
            int(text.lstrip("+-").partition(".")[0].partition("e")[0].partition("E")[0], 0)  # no leading zeros
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text} is too large") from None
        return number
    if not -(1 << 63) <= whole < 1 << 64:  # a checkpoint cannot hold it
        raise ValueError(f"{text[:24]} has more than 64 bits")
    return whole


def _text(quoted: str) -> str:
    """Return the value of a text in quotes: Python's, which is JSON's as well but for the escape of a slash."""
    prefix = quoted[: len(quoted) - len(quoted.lstrip("rRuU"))]
    length = 3 if quoted[len(prefix) :].startswith(('"""', "'''")) else 1
    body = quoted[len(prefix) + length : -length]
    value = body if prefix in ("r", "R") else _ESCAPE.sub(_unescape, body)
    # JSON writes a character beyond 16 bits as two escapes; half of one is an error.
    return value.encode("utf-16", "surrogatepass").decode("utf-16")


def _unescape(match: re.Match[str]) -> str:
    kind = match[1][0]
    if kind in _ESCAPES:
        return _ESCAPES[kind]
    if kind in "xuU" and len(match[1]) > 1:
        return chr(int(match[1][1:], 16))
    if kind in "01234567":
        return chr(int(match[1], 8))
    if kind == "N" and len(match[1]) > 1:
        return unicodedata.lookup(match[1][2:-1])
    if kind in "xuUN/":
        raise ValueError(f"\\{kind} is not an escape, or is another one in JSON than in Python")
    return match[0]


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Format a call for a reader: `name(argument="value", other=1)`."""
    listed = ", ".join(
        f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in arguments.items()
    )
    return f"{name}({listed})"


# References to earlier results

# The beginning of an amount of money with cents or a thousands separator is not a reference; `max($1,2)` has one.
_REFERENCE = re.compile(r"\$(\{)?(\d{1,4})(?(1)\}|\b(?!\.\d|,\d{2,3}(?!\d)))")


def map_references(text: str, change: Callable[[int, str], str]) -> str:
    """Replace each `$1` and `${1}` in a text by `change(number, reference)`."""
    return _REFERENCE.sub(lambda match: change(int(match[2]), match[0]), text)


def whole_reference(text: str) -> int | None:
    """Return the number of a text that is one reference and nothing else."""
    match = _REFERENCE.fullmatch(text.strip())
    return int(match[2]) if match is not None else None


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Apply `change` to each text in a value, at any depth of lists and dictionaries."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_texts(entry, change) for entry in value]
    if isinstance(value, dict):
        return {key: map_texts(entry, change) for key, entry in value.items()}
    return value


def references(value: Any) -> frozenset[int]:
    """Return the numbers of all references in the texts of a value."""
    texts: list[str] = []
    map_texts(value, texts.append)
    return frozenset(int(match[2]) for text in texts for match in _REFERENCE.finditer(text))


# The schemas of arguments


@dataclass(frozen=True)
class Parameters:
    """The arguments of a tool, by its JSON schema."""

    schema: Mapping[str, Any]

    @classmethod
    def of(cls, tool: BaseTool) -> Self:
        """Return a tool's parameters as a model sees them; raises ConfigurationError for a schema that is too large."""
        schema = describe_function(tool)["parameters"]
        return cls({key: value for key, value in schema.items() if value is not None})

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the arguments, by name."""
        properties = self.schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required_names(self) -> Sequence[str]:
        """Names of the required arguments."""
        required = self.schema.get("required")
        return required if isinstance(required, list) else ()

    @property
    def allows_any_name(self) -> bool:
        """Whether the schema accepts arguments that it does not name."""
        return bool(self.schema.get("additionalProperties") or self.schema.get("patternProperties"))

    def is_text(self, name: str) -> bool:
        """Whether an argument is a text, or null."""
        return "string" in (kinds := _kinds(self.properties.get(name))) and kinds <= {"string", "null"}

    def find_missing_text(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the name of the argument that alone is missing among the required ones, if it is a text."""
        missing = [name for name in self.required_names if name not in arguments]
        return missing[0] if len(missing) == 1 and self.is_text(missing[0]) else None

    def read(self, text: str, at: int, results: int) -> tuple[dict[str, Any], int]:
        """Read the arguments of a call by name, and where it ends; see `read_arguments`.

        Raises:
            ValueError: They cannot be read exactly, or do not belong to the schema's arguments one to one.
        """
        names = list(self.properties)
        written = read_arguments(text, at, names, results, any_name=self.allows_any_name)
        if len(written.positional) == 1 and isinstance(whole := written.positional[0], dict) and not written.named:
            readings = [reading for reading in (whole, *({name: whole} for name in names[:1])) if self.fits(reading)]
            if len(readings) != 1:
                raise ValueError("the object is neither all arguments nor the first one, or it could be both")
            return readings[0], written.end
        if len(written.positional) > len(names):
            raise ValueError("there are more values than arguments")
        arguments = dict(zip(names, written.positional, strict=False))
        if twice := arguments.keys() & written.named.keys():
            raise ValueError(f"{', '.join(twice)}: given twice")
        return arguments | written.named, written.end

    def fits(self, arguments: Mapping[str, Any], *, with_references: bool = True) -> bool:
        """Whether the schema accepts arguments; `with_references` leaves out those whose values hold references."""
        if not self.allows_any_name and not arguments.keys() <= self.properties.keys():
            return False
        open_names = {name for name, value in arguments.items() if with_references and references(value)}
        return self._misfits(arguments) <= open_names

    def accepts(self, name: str, value: Any) -> bool:
        """Whether the schema accepts a value of one argument."""
        return name not in self._misfits({name: value})

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError with the reasons if the schema refuses arguments; one that cannot be read refuses none."""
        problems = [
            f"{'.'.join(map(str, error.path)) or 'they'}: {error.message[:_MAX_PROBLEM]}"
            for error in islice(self._errors(arguments) or (), _MAX_PROBLEMS)
        ]
        if problems:
            raise ValueError(f"wrong arguments: {'; '.join(problems)}")

    def _misfits(self, arguments: Mapping[str, Any]) -> set[str | None]:
        """Return the names of the arguments that the schema refuses; None stands for all of them together."""
        errors = self._errors(arguments)
        return {None} if errors is None else {error.path[0] if error.path else None for error in errors}

    def _errors(self, arguments: Mapping[str, Any]) -> list[ValidationError] | None:
        """Return why the schema refuses arguments; None: it is invalid, and does not say what fits."""
        _followed.count = 0
        try:
            return [*_Validator(self.schema, registry=Registry()).iter_errors(arguments)]
        except Exception:  # an invalid schema fails in many ways
            return None


def _kinds(schema: Any) -> set[str]:
    """Return the types of a schema's values; "any" stands for all."""
    if not isinstance(schema, Mapping):
        return {"any"}
    if isinstance(options := schema.get("anyOf") or schema.get("oneOf"), list):
        return {kind for option in options for kind in _kinds(option)}
    kinds = schema.get("type", "any")
    return {str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])}


_followed = threading.local()


def _follow(validator: Any, ref: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    _followed.count += 1
    if _followed.count > _MAX_REFERENCES:
        raise RecursionError("the schema is too large")
    yield from Draft202012Validator.VALIDATORS["$ref"](validator, ref, instance, schema)


def _additional(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    if "patternProperties" not in schema:
        yield from Draft202012Validator.VALIDATORS["additionalProperties"](validator, value, instance, schema)


def _accept(*_: Any) -> tuple[()]:
    return ()


# A tool's author writes the patterns, and some take for ever: only the tool itself matches them.
_Validator = validators.extend(
    Draft202012Validator,
    {
        "$ref": _follow,
        "additionalProperties": _additional,
        **dict.fromkeys(("pattern", "patternProperties", "$dynamicRef", "unevaluatedProperties"), _accept),
    },
)
