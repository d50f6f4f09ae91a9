"""JSON schemas of replies: traversal, adaptation to llguidance, and limits that keep grammars quick to compile."""

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.texts import check_encodable

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
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
_APPLICATORS = frozenset({"properties", "anyOf", "oneOf", "allOf", "$ref"})

KEYWORDS = frozenset(
    {*_MAPS, *_LISTS, *_SINGLE, "type", "enum", "const", "$ref", "required", "format", "pattern", "multipleOf"}
    | {f"{side}{suffix}" for side in ("min", "max") for suffix in ("imum", "Length", "Items", "Properties", "Contains")}
    | {"exclusiveMinimum", "exclusiveMaximum", "uniqueItems", "dependentRequired"}
)
"""Keywords that constrain a value."""

_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats for which llguidance has grammars."""

# Within these limits, vLLM compiles the grammar of the worst schema in about a second, in a thread of its own, and
# computes the allowed next tokens in milliseconds.
MAX_BYTES = 256 * 1024
MAX_PARTS = 4_000  # objects and lists
MAX_DEPTH = 64  # levels of objects and lists: vLLM's limit
_MAX_DEPTH_WITH_REFS = 600  # including all referenced schemas: llguidance recurses, and fails from about 2,500
MAX_ENUM = 10_000
MAX_ITEMS = 10_000
_MAX_ITEMS_TOTAL = 20_000
MAX_ALTERNATIVES = 400  # alternatives of the next value or property: from about 500, llguidance fails within a reply
_MAX_COMBINED = 50  # combinations of alternatives, as by `allOf`: each combination becomes an object of its own
_MAX_COUNT = 2**31 - 1
_MAX_FACTORS = 10_000
_MAX_NUMBER = 1e300  # larger ones are not numbers for llguidance
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # index of a list in a reference


def subschemas(schema: Mapping[str, Any], *, with_ids: bool = True) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all its subschemas; without `with_ids`, skip those with an `$id`, the base of references."""
    pending: list[Any] = [schema]
    while pending:
        subschema = pending.pop()
        if not isinstance(subschema, Mapping) or (not with_ids and isinstance(subschema.get("$id"), str)):
            continue
        yield subschema
        for name in _MAPS:
            if isinstance(named := subschema.get(name), Mapping):
                pending += named.values()
        for name in _LISTS:
            if isinstance(listed := subschema.get(name), list):
                pending += listed
        pending += [subschema.get(name) for name in _SINGLE]


_REPAIRED = {*_MAPS, "enum", "anyOf", "oneOf", "allOf", "prefixItems", "required", "type", "default", "$ref"}


def repair(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a tool's schema without keywords that have no meaning, such as `required: true` or `enum: []`.

    Authors of tools leave such keywords behind, and a strict reader would refuse the whole tool for them.
    """
    copied = copy.deepcopy(dict(schema))
    for part in list(subschemas(copied)):
        if not isinstance(part, dict):
            continue
        for name in part.keys() & _REPAIRED:
            value = part[name]
            if name in _MAPS:
                valid = isinstance(value, Mapping)
            elif name == "required":
                part[name] = [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []
                valid = bool(part[name])
            elif name == "type":
                kinds = [kind for kind in value if isinstance(kind, str)] if isinstance(value, list) else value
                part[name] = kinds
                valid = bool(kinds) and isinstance(kinds, (str, list))
            elif name == "$ref":
                valid = isinstance(value, str) and bool(value)
            elif name == "default":
                valid = not isinstance(value, float) or math.isfinite(value)
            else:
                valid = isinstance(value, list) and bool(value)
            if not valid:
                del part[name]
    return copied


def composes(schema: Mapping[str, Any]) -> bool:
    """Whether several keywords describe one object of the schema, so that none of them names all its properties."""
    return any(
        len(part.keys() & _APPLICATORS) > 1 or (isinstance(schemas := part.get("allOf"), list) and len(schemas) > 1)
        for part in subschemas(schema)
    )


def refers_to_itself(schema: Mapping[str, Any]) -> bool:
    """Whether a reference in the schema is recursive."""
    refs: dict[str, set[str]] = {}
    by_target: dict[int, set[str]] = {}  # many references may have one target
    pending = {ref for part in subschemas(schema) if isinstance(ref := part.get("$ref"), str)}
    for ref in pending:
        referenced = target(schema, ref)
        if id(referenced) not in by_target:
            parts = subschemas(referenced) if isinstance(referenced, Mapping) else ()
            by_target[id(referenced)] = {inner for part in parts if isinstance(inner := part.get("$ref"), str)}
        refs[ref] = by_target[id(referenced)]
    # Remove the references that lead to no other, until none is left or only cycles are.
    while ends := {ref for ref, inner in refs.items() if not inner & refs.keys()}:
        refs = {ref: inner for ref, inner in refs.items() if ref not in ends}
    return bool(refs)


def relocate(schema: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """Copy a checked schema for a place in another one, given as a JSON pointer, and redirect its references there."""
    copied = copy.deepcopy(dict(schema))
    # The same object may occur in several places.
    for part in {id(part): part for part in subschemas(copied, with_ids=False)}.values():
        ref = part.get("$ref")
        if isinstance(part, dict) and isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            part["$ref"] = f"#{pointer}{ref[1:]}"
    return copied


def for_llguidance(schema: dict[str, Any]) -> dict[str, Any]:
    """Copy a schema for llguidance: property names become a pattern, and formats without a grammar are dropped."""
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
    """The regular expression for the strings of a schema with `pattern`, `enum` or `const`; else None."""
    match names:
        case {"pattern": str() as pattern}:
            return pattern
        case {"enum": [_, *_] as keys} | {"const": str() as keys}:
            strings = [keys] if isinstance(keys, str) else keys
            if all(isinstance(key, str) for key in strings):
                return f"^(?:{'|'.join(map(re.escape, strings))})$"
    return None


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if a schema is malformed, or exceeds a limit, which the message names."""
    try:
        size = len(json.dumps(schema, allow_nan=False))
        check_encodable(schema, "the JSON schema")
    except RecursionError:
        raise ConfigurationError(f"a JSON schema has at most {MAX_DEPTH} levels") from None
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"a JSON schema is JSON: {error}") from error
    _check_limit(size, MAX_BYTES, "bytes")
    levels = _levels(schema)
    depth = levels[id(schema)]
    _check_limit(depth, MAX_DEPTH, "levels")
    parts = list(subschemas(schema))
    targets = {ref for part in parts if isinstance(ref := part.get("$ref"), str)}
    _check_references(parts, targets)
    _check_numbers(parts)
    depth_with_refs = depth + sum(levels.get(id(target(schema, ref)), 0) for ref in targets)
    _check_limit(depth_with_refs, _MAX_DEPTH_WITH_REFS, "levels with everything that it refers to")
    enum_values = item_sum = 0
    factors = []
    alternatives: dict[int, _Alternatives] = {}
    for part in parts:
        for keyword in ("minLength", "maxLength", "minProperties", "maxProperties"):
            _check_limit(_count_or_zero(part.get(keyword)), _MAX_COUNT, f"as its {keyword}")
        for keyword in ("minItems", "maxItems"):
            item_sum += (count := _count_or_zero(part.get(keyword)))
            _check_limit(count, MAX_ITEMS, f"as its {keyword}")
        for keyword in ("enum", "anyOf", "oneOf", "allOf"):
            if part.get(keyword) == []:
                raise ConfigurationError(f"{keyword} of a JSON schema has at least one value")
        enum_values += len(values) if isinstance(values := part.get("enum"), list) else 0
        if "multipleOf" in part:
            factors.append(_factor(part["multipleOf"]))
        _check_limit(_optional(part)[1], MAX_ALTERNATIVES, "optional properties in a row")
        _check_limit(_alternatives(schema, part, alternatives).all, MAX_ALTERNATIVES, "alternatives for one value")
    _check_limit(item_sum, _MAX_ITEMS_TOTAL, "as the sum of its minItems and maxItems")
    _check_limit(enum_values, MAX_ENUM, "values in enums")
    # If several factors hold for one number, the grammar is that of their common multiple.
    multiple = math.prod(set(factors) - {0}) if composes(schema) else sum(factors)
    _check_limit(multiple, _MAX_FACTORS, "as the sum of its multipleOf (of their product, where it combines schemas)")


def _check_references(parts: list[Mapping[str, Any]], refs: set[str]) -> None:
    """Refuse references to schemas elsewhere: none is ever fetched."""
    ids = {str(part[name]) for part in parts for name in ("$id", "id") if name in part}
    for ref in refs:
        if (base := ref.partition("#")[0]) and not ids:
            raise ConfigurationError(
                f"a JSON schema refers to {ascii(base)[1:-1][:100]}, which is never fetched: add that to its $defs"
            )


def _check_numbers(parts: list[Mapping[str, Any]]) -> None:
    for part in parts:
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if isinstance(value := part.get(keyword), (int, float)) and abs(value) > _MAX_NUMBER:
                raise ConfigurationError(f"{keyword} of a JSON schema is at most {_MAX_NUMBER:g}")


def _check_limit(count: int, limit: int, quantity: str) -> None:
    if count > limit:
        raise ConfigurationError(f"a JSON schema has at most {limit:,} {quantity}")


def _levels(schema: Mapping[str, Any]) -> dict[int, int]:
    """The height in levels of each object and list of a schema, itself included, by `id`."""
    values: list[Any] = [schema]
    for value in values:
        _check_limit(len(values), MAX_PARTS, "objects and lists")
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
    """The target of a reference in a schema; None if the schema does not contain it."""
    if not ref.startswith("#"):
        return None
    value: Any = schema
    for part in unquote(ref[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


class _Alternatives(NamedTuple):
    """Counts of alternatives where a schema applies: schemas, and their keys and values in total."""

    schemas: int
    all: int


def _alternatives(schema: Mapping[str, Any], part: Any, cache: dict[int, _Alternatives]) -> _Alternatives:
    if not isinstance(part, Mapping):
        return _Alternatives(1, 1)
    if id(part) in cache:
        return cache[id(part)]
    cache[id(part)] = _Alternatives(1, 1)  # ends the recursion of a schema that refers to itself
    optional = _optional(part)[0] if isinstance(part.get("properties"), Mapping) else 0
    # Constraints that all hold for one value.
    conjuncts: list[_Alternatives] = []
    for keyword in ("anyOf", "oneOf"):
        if isinstance(members := part.get(keyword), list):
            choices = [_alternatives(schema, choice, cache) for choice in members]
            conjuncts.append(_Alternatives(sum(one.schemas for one in choices), sum(one.all for one in choices)))
    if isinstance(members := part.get("allOf"), list):
        conjuncts += [_alternatives(schema, member, cache) for member in members]
    if isinstance(ref := part.get("$ref"), str):
        conjuncts.append(_alternatives(schema, target(schema, ref), cache))
    schemas = math.prod(one.schemas for one in conjuncts)
    if sum(one.schemas > 1 for one in conjuncts) > 1:
        _check_limit(schemas, _MAX_COMBINED, "alternatives that are combined with each other")
    result = cache[id(part)] = _Alternatives(schemas, optional + max((one.all for one in conjuncts), default=1))
    return result


def _optional(part: Mapping[str, Any]) -> tuple[int, int]:
    """Count the optional properties before the first required one, and those in the longest run."""
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, Mapping):
        return 0, 0
    required_names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    runs = [0]
    for name in properties:
        if name in required_names:
            runs.append(0)
        else:
            runs[-1] += 1
    return runs[0], max(runs)


def _count_or_zero(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _factor(value: Any) -> int:
    """The digits of a number without zeros at both ends, which make its multiples hard to recognise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    digits = f"{value:f}" if isinstance(value, float) else str(value)
    return int(digits.replace(".", "").strip("-").strip("0") or 0)
