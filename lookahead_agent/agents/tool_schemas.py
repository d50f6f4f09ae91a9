"""Checks of the schemas of foreign tools: small schemas can take hours to resolve or to match."""

import json
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from lookahead_agent.engines.json_schema import repair, target
from lookahead_agent.errors import ConfigurationError

_MAPS_OF_NAMES = ("properties", "patternProperties", "dependentSchemas")
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
        function = {"name": tool.name, "description": tool.description, "parameters": _resolve(schema, schema)}
    else:
        function = convert_to_openai_tool(tool)["function"]
    return {**function, "parameters": with_all_fields(repair(function.get("parameters") or {}))}


def _resolve(part: Any, schema: Mapping[str, Any], followed: frozenset[str] = frozenset(), names: bool = False) -> Any:
    """Copy a part of a checked schema with the targets in place of references, up to one inside of its own target.

    `names`: the part maps the names of properties to schemas.
    """
    if isinstance(part, list):
        return [_resolve(member, schema, followed) for member in part]
    if not isinstance(part, Mapping):
        return part
    if names:
        return {name: _resolve(member, schema, followed) for name, member in part.items()}
    own = {
        key: _resolve(member, schema, followed, key in _MAPS_OF_NAMES)
        for key, member in part.items()
        if key not in ("$ref", "$defs", "definitions")
    }
    ref = part.get("$ref")
    if not isinstance(ref, str) or not ref or ref in followed:
        return own
    found = _resolve(target(schema, ref), schema, followed | {ref})
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
    parts = 0
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
            if names or key not in ("$ref", "$defs")
        ]
        ref = None if names else part.get("$ref")
        if not ref or (isinstance(ref, str) and ref in followed):
            continue
        is_local = isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))
        if not is_local or (referenced := target(schema, ref)) is None:
            raise ValueError(f"its schema refers to {str(ref)[:100]!r}, which is no part of it")
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
