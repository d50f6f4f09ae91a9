"""Checks of the schemas of foreign tools: small schemas can take hours to resolve or to match."""

import json
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from lookahead_agent.engines.json_schema import repair, subschemas, target
from lookahead_agent.errors import ConfigurationError

_MAPS_OF_NAMES = ("properties", "patternProperties", "dependentSchemas")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords that mean nothing once each reference is replaced by its target.
_OF_REFERENCES = frozenset(
    {*_REFERENCES, "$defs", "definitions", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$id"}
)
_MAX_BYTES = 64 << 10
_MAX_LEVELS = 64
_MAX_PARTS = 5_000  # Objects, lists and values of a schema in which each reference is replaced by its target


def check_tools(tools: Iterable[object]) -> None:
    """Raise ConfigurationError for a tool whose JSON schema LangChain or a template might resolve for hours."""
    for tool in tools:
        if isinstance(tool, BaseTool) and isinstance(tool.args_schema, dict):
            try:
                check_tool_schema(tool.args_schema)
            except ValueError as error:
                raise ConfigurationError(f"the tool {tool.name[:100]!r} cannot be used: {error}") from error


def describe_function(tool: BaseTool | Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's name, description and parameters as LangChain has them, without malformed keywords.

    Parameters that alternatives or parts of the schema describe are among its `properties`, too.

    Raises:
        ConfigurationError: The schema is too large, or refers to something outside of it.
    """
    check_tools([tool])
    schema = tool.tool_call_schema if isinstance(tool, BaseTool) else None
    if isinstance(tool, BaseTool) and isinstance(schema, dict):
        # LangChain resolves fewer references than JSON has, and takes a property "$ref" for one.
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": _resolve(schema, _References(schema)),
        }
    else:
        function = convert_to_openai_tool(tool)["function"]
    return {**function, "parameters": with_all_fields(repair(function.get("parameters") or {}))}


class _References:
    """The parts of a schema by the references that lead to them: pointers, anchors and identifiers."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._parts: dict[str, Mapping[str, Any]] = {"": schema}
        for part in subschemas(schema):
            for key, prefix in (("$anchor", "#"), ("$dynamicAnchor", "#"), ("$id", ""), ("id", "")):
                if isinstance(name := part.get(key), str):
                    self._parts.setdefault(prefix + name.removesuffix("#"), part)

    def find(self, ref: Any) -> Any:
        """Return the part that a reference leads to; None if the schema does not contain it."""
        if not isinstance(ref, str):
            return None
        resource, _, fragment = ref.partition("#")
        if (root := self._parts.get(resource)) is None or not fragment:
            return root
        return target(root, f"#{fragment}") if fragment.startswith("/") else self._parts.get(f"#{fragment}")


def without_named_references(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a checked schema with the targets in place of references if one of them is by an anchor or identifier.

    LangChain reads references by JSON pointers only.
    """
    references = [part[key] for part in subschemas(schema) for key in _REFERENCES if part.get(key)]
    has_pointers_only = all(isinstance(ref, str) and (ref == "#" or ref.startswith("#/")) for ref in references)
    return schema if has_pointers_only else dict(_resolve(schema, _References(schema)))


def _reference(part: Mapping[str, Any]) -> Any:
    return next((part[key] for key in _REFERENCES if part.get(key)), None)


def _resolve(part: Any, parts: _References, followed: frozenset[str] = frozenset(), names: bool = False) -> Any:
    """Copy a part of a checked schema with the targets in place of references, up to one inside of its own target.

    `names`: the part maps the names of properties to schemas.
    """
    if isinstance(part, list):
        return [_resolve(member, parts, followed) for member in part]
    if not isinstance(part, Mapping):
        return part
    if names:
        return {name: _resolve(member, parts, followed) for name, member in part.items()}
    own = {
        key: _resolve(member, parts, followed, key in _MAPS_OF_NAMES)
        for key, member in part.items()
        if key not in _OF_REFERENCES
    }
    ref = _reference(part)
    if not isinstance(ref, str) or ref in followed:
        return own
    found = _resolve(parts.find(ref), parts, followed | {ref})
    return {**found, **own} if isinstance(found, Mapping) else own


def with_all_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose `properties` also has the fields of its `allOf`, `anyOf` and `oneOf`.

    Those that every part of `allOf` requires together are required; those of alternatives are optional.
    """
    properties: dict[str, Any] = dict(schema.get("properties") or {})
    required: list[str] = list(schema.get("required") or ())
    for key in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(key) or ():
            if isinstance(part, Mapping):
                inner = with_all_fields(part)
                for name, field in inner.get("properties", {}).items():
                    properties.setdefault(name, field)
                required += inner.get("required", ()) if key == "allOf" else ()
    found = {"properties": properties, "required": [*dict.fromkeys(required)]}
    return {**schema, **{key: value for key, value in found.items() if value}}


def check_tool_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError unless the schema is of an object, small, and has references to its own parts only."""
    try:
        text = json.dumps(schema, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("its schema has a lone surrogate, which no message can carry") from None
    except RecursionError:
        raise ValueError("its schema is nested too deeply") from None
    if len(text) > _MAX_BYTES:
        raise ValueError(f"its schema has more than {_MAX_BYTES >> 10} KiB")
    properties = schema.get("properties") or {}
    kinds = schema.get("type")
    is_object = "object" in kinds if isinstance(kinds, list) else kinds in (None, "object")
    if not is_object or not isinstance(properties, Mapping):
        raise ValueError("its schema has to be that of an object, with `properties`")
    if any(not isinstance(value, (Mapping, bool, NoneType)) for value in properties.values()):
        raise ValueError("its schema has a property without a schema")
    check_references(schema)


def check_references(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if a schema is large once all references are resolved, or refers to something outside of it.

    LangChain replaces each reference by its target, up to the first that is inside of its own target.
    """
    parts, references = 0, _References(schema)
    pending: list[tuple[Any, frozenset[str], int, bool]] = [(schema, frozenset(), 1, False)]
    while pending:
        part, followed, level, names = pending.pop()
        parts += 1
        if parts > _MAX_PARTS:
            raise ValueError(f"its schema has more than {_MAX_PARTS:,} parts with everything that it refers to")
        if level > _MAX_LEVELS:
            raise ValueError(f"its schema has more than {_MAX_LEVELS} levels with everything that it refers to")
        if isinstance(part, list):
            pending += [(member, followed, level + 1, False) for member in part]
        if not isinstance(part, Mapping):
            continue
        pending += [
            (member, followed, level + 1, not names and key in _MAPS_OF_NAMES)
            for key, member in part.items()
            if names or key not in (*_REFERENCES, "$defs")
        ]
        ref = None if names else _reference(part)
        if not ref or (isinstance(ref, str) and ref in followed):
            continue
        if (referenced := references.find(ref)) is None:
            raise ValueError(f"its schema refers to {str(ref)[:100]!r}, which is not a part of it")
        pending.append((referenced, followed | {ref}, level + 1, False))


def misfit(value: Any, schema: Mapping[str, Any] | None) -> str | None:
    """Say why a structured result does not have the properties of a schema, with their types; None: it has.

    Deeper parts are not compared, because a server's schema may be one that takes hours to compare.
    """
    if schema is None:
        return None
    if not isinstance(value, Mapping):
        return "it has no structured content"
    required = schema.get("required")
    if missing := [name for name in required if name not in value] if isinstance(required, list) else []:
        return f"{str(missing[0])[:200]!r} is missing"
    properties = schema.get("properties")
    for name, property_schema in properties.items() if isinstance(properties, Mapping) else ():
        kinds = property_schema.get("type") if isinstance(property_schema, Mapping) else None
        names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        checks = [_IS_OF_TYPE[kind] for kind in names if isinstance(kind, str) and kind in _IS_OF_TYPE]
        if name in value and checks and not any(check(value[name]) for check in checks):
            return f"{name[:200]!r} is not of the type {'/'.join(map(str, names))}"
    return None


_IS_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, Mapping),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
}
