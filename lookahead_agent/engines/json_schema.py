"""JSON schemas of replies: what is in them, and how much of it a grammar can be made of while others wait."""

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from lookahead_agent.errors import ConfigurationError

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "additionalItems",
    "unevaluatedItems",
    "not",
    "if",
    "then",
    "else",
    "contentSchema",
)
_APPLIED = frozenset({"properties", "anyOf", "oneOf", "allOf", "$ref"})

KEYWORDS = frozenset(
    {*_BY_NAME, *_LISTED, *_SINGLE, "type", "enum", "const", "$ref", "required", "format", "pattern", "multipleOf"}
    | {f"{side}{what}" for side in ("min", "max") for what in ("imum", "Length", "Items", "Properties", "Contains")}
    | {"exclusiveMinimum", "exclusiveMaximum", "uniqueItems", "dependentRequired"}
)
"""Keywords that say something about a value."""

_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats that llguidance has grammars of."""

# Chosen so that vLLM makes the grammar of the worst schema within them in about a second, in a thread of its own, and
# finds the tokens that may come next in milliseconds.
MOST_BYTES = 256 * 1024
MOST_PARTS = 4_000  # objects and lists
DEEPEST = 64  # levels of objects and lists, as vLLM bounds them
_DEEPEST_WITH_REFS = 600  # with everything referred to: llguidance recurses, and fails from about 2,500
MOST_ENUM = 10_000
MOST_ITEMS = 10_000
_MOST_ITEMS_IN_ALL = 20_000
MOST_ALTERNATIVES = 400  # of what may come next: llguidance gives up in the middle of a reply from about 500
_MOST_COMBINED = 50  # alternatives combined with each other, as by `allOf`: each is read as an object of its own
_LARGEST_COUNT = 2**31 - 1
_LARGEST_FACTORS = 10_000


def subschemas(schema: Mapping[str, Any], *, with_ids: bool = True) -> Iterator[Mapping[str, Any]]:
    """A schema and every schema in it; perhaps without those of a name of their own, from which references count."""
    left: list[Any] = [schema]
    while left:
        found = left.pop()
        if not isinstance(found, Mapping) or (not with_ids and isinstance(found.get("$id"), str)):
            continue
        yield found
        for name in _BY_NAME:
            if isinstance(named := found.get(name), Mapping):
                left += named.values()
        for name in _LISTED:
            if isinstance(listed := found.get(name), list):
                left += listed
        left += [found.get(name) for name in _SINGLE]


def composes(schema: Mapping[str, Any]) -> bool:
    """Whether an object of the schema is described in several places, so that none of them names all its properties."""
    return any(
        len(found.keys() & _APPLIED) > 1 or (isinstance(parts := found.get("allOf"), list) and len(parts) > 1)
        for found in subschemas(schema)
    )


def refers_to_itself(schema: Mapping[str, Any]) -> bool:
    """Whether a reference in a schema leads back to itself."""
    refs: dict[str, set[str]] = {}
    left = {ref for part in subschemas(schema) if isinstance(ref := part.get("$ref"), str)}
    for ref in left:
        found = target(schema, ref)
        inside = subschemas(found) if isinstance(found, Mapping) else ()
        refs[ref] = {inner for part in inside if isinstance(inner := part.get("$ref"), str)}
    # Whatever leads nowhere any more is taken away until nothing is left, or only what leads back to itself.
    while ends := {ref for ref, inner in refs.items() if not inner & refs.keys()}:
        refs = {ref: inner for ref, inner in refs.items() if ref not in ends}
    return bool(refs)


def relocated(schema: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """A copy of a checked schema as part of another one, at a JSON pointer: its references point there."""
    copied = copy.deepcopy(dict(schema))
    # One object may be in several places.
    for part in {id(part): part for part in subschemas(copied, with_ids=False)}.values():
        ref = part.get("$ref")
        if isinstance(part, dict) and isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            part["$ref"] = f"#{pointer}{ref[1:]}"
    return copied


def for_llguidance(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy as llguidance takes it: names of properties as a pattern, and without formats that it does not know."""
    schema = copy.deepcopy(schema)
    for part in list(subschemas(schema)):
        if isinstance(part, dict) and part.get("format") not in (None, *_FORMATS):
            del part["format"]
        names = part.get("propertyNames")
        if isinstance(names, Mapping) and isinstance(ref := names.get("$ref"), str):
            names = target(schema, ref)
        pattern = _pattern_of(names)
        if pattern is not None and isinstance(part, dict) and not part.keys() & {"properties", "patternProperties"}:
            part["patternProperties"] = {pattern: part.pop("additionalProperties", {})}
            part["additionalProperties"] = False
            del part["propertyNames"]
    return schema


def _pattern_of(names: Any) -> str | None:
    """The pattern of the texts that a schema allows, if it lists them or says it itself."""
    match names:
        case {"pattern": str() as pattern}:
            return pattern
        case {"enum": [_, *_] as keys} | {"const": str() as keys}:
            listed = [keys] if isinstance(keys, str) else keys
            if all(isinstance(key, str) for key in listed):
                return f"^(?:{'|'.join(map(re.escape, listed))})$"
    return None


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, with the bound, if no grammar can be made of a schema of this size."""
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except RecursionError:
        raise ConfigurationError(f"a JSON schema has at most {DEEPEST} levels") from None
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"a JSON schema is JSON: {error}") from error
    _bound(size, MOST_BYTES, "bytes")
    levels = _levels(schema)
    within = levels[id(schema)]
    _bound(within, DEEPEST, "levels")
    parts = list(subschemas(schema))
    targets = {ref for part in parts if isinstance(ref := part.get("$ref"), str)}
    deep = within + sum(levels.get(id(target(schema, ref)), 0) for ref in targets)
    _bound(deep, _DEEPEST_WITH_REFS, "levels with everything that it refers to")
    enum = items = 0
    factors = []
    alternatives: dict[int, _Alternatives] = {}
    for part in parts:
        for keyword in ("minLength", "maxLength", "minProperties", "maxProperties"):
            _bound(_whole(part.get(keyword)), _LARGEST_COUNT, f"as its {keyword}")
        for keyword in ("minItems", "maxItems"):
            items += (found := _whole(part.get(keyword)))
            _bound(found, MOST_ITEMS, f"as its {keyword}")
        for keyword in ("enum", "anyOf", "oneOf", "allOf"):
            if part.get(keyword) == []:
                raise ConfigurationError(f"{keyword} of a JSON schema has at least one value")
        enum += len(listed) if isinstance(listed := part.get("enum"), list) else 0
        if "multipleOf" in part:
            factors.append(_factor(part["multipleOf"]))
        _bound(_optional(part)[1], MOST_ALTERNATIVES, "optional properties in a row")
        _bound(_alternatives(schema, part, alternatives).all, MOST_ALTERNATIVES, "alternatives for one value")
    _bound(items, _MOST_ITEMS_IN_ALL, "as the sum of its minItems and maxItems")
    _bound(enum, MOST_ENUM, "values in enums")
    # Of several that may hold for one number, the grammar is that of their common multiple.
    multiple = math.prod(set(factors) - {0}) if composes(schema) else sum(factors)
    _bound(multiple, _LARGEST_FACTORS, "as the sum of its multipleOf (of their product, where it combines schemas)")


def _bound(found: int, most: int, what: str) -> None:
    if found > most:
        raise ConfigurationError(f"a JSON schema has at most {most:,} {what}")


def _levels(schema: Mapping[str, Any]) -> dict[int, int]:
    """How many levels of objects and lists each of a schema's has, itself included, by identity."""
    values: list[Any] = [schema]
    for value in values:
        _bound(len(values), MOST_PARTS, "objects and lists")
        inner = value.values() if isinstance(value, Mapping) else value
        values += [part for part in inner if isinstance(part, (Mapping, list))]
    levels: dict[int, int] = {}
    for value in reversed(values):
        inner = value.values() if isinstance(value, Mapping) else value
        levels[id(value)] = 1 + max(
            (levels[id(part)] for part in inner if isinstance(part, (Mapping, list))), default=0
        )
    return levels


def target(schema: Mapping[str, Any], ref: str) -> Any:
    """The target of a reference in a schema; None if it is not in it."""
    if not ref.startswith("#"):
        return None
    found: Any = schema
    for part in unquote(ref[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


class _Alternatives(NamedTuple):
    """Counts of alternatives where a schema applies: schemas, and their keys and values in all."""

    schemas: int
    all: int


def _alternatives(schema: Mapping[str, Any], part: Any, known: dict[int, _Alternatives]) -> _Alternatives:
    if not isinstance(part, Mapping):
        return _Alternatives(1, 1)
    if id(part) in known:
        return known[id(part)]
    known[id(part)] = _Alternatives(1, 1)  # where it refers to itself
    own = _optional(part)[0] if isinstance(part.get("properties"), Mapping) else 0
    # Of one value, each must hold.
    together: list[_Alternatives] = []
    for keyword in ("anyOf", "oneOf"):
        if isinstance(listed := part.get(keyword), list):
            choices = [_alternatives(schema, choice, known) for choice in listed]
            together.append(_Alternatives(sum(one.schemas for one in choices), sum(one.all for one in choices)))
    if isinstance(listed := part.get("allOf"), list):
        together += [_alternatives(schema, one, known) for one in listed]
    if isinstance(ref := part.get("$ref"), str):
        together.append(_alternatives(schema, target(schema, ref), known))
    schemas = math.prod(one.schemas for one in together)
    if sum(one.schemas > 1 for one in together) > 1:
        _bound(schemas, _MOST_COMBINED, "alternatives that are combined with each other")
    found = known[id(part)] = _Alternatives(schemas, own + max((one.all for one in together), default=1))
    return found


def _optional(part: Mapping[str, Any]) -> tuple[int, int]:
    """How many properties may be left out before the first that may not, and most in a row."""
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, Mapping):
        return 0, 0
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    runs = [0]
    for name in properties:
        if name in needed:
            runs.append(0)
        else:
            runs[-1] += 1
    return runs[0], max(runs)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _factor(value: Any) -> int:
    """The digits of a number without its zeros at both ends: what makes its multiples hard to tell."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    digits = f"{value:f}" if isinstance(value, float) else str(value)
    return int(digits.replace(".", "").strip("-").strip("0") or 0)
