"""Checks of the schemas of foreign tools: small schemas can take hours to resolve or to match."""

import json
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any

from langchain_core.tools import BaseTool

from lookahead_agent.engines.json_schema import target
from lookahead_agent.errors import ConfigurationError

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
    if schema.get("type") not in (None, "object") or not isinstance(properties, Mapping):
        raise ValueError("its schema has to be that of an object, with `properties`")
    if any(not isinstance(value, (Mapping, bool, NoneType)) for value in properties.values()):
        raise ValueError("its schema has a property without a schema")
    check_references(schema)


def check_references(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if a schema is large once all references are resolved, or refers to something outside of it.

    LangChain replaces each reference by its target, up to the first that is inside of its own target.
    """
    parts = 0
    pending: list[tuple[Any, frozenset[str], int]] = [(schema, frozenset(), 1)]
    while pending:
        part, followed, level = pending.pop()
        parts += 1
        if parts > _MAX_PARTS:
            raise ValueError(f"its schema has more than {_MAX_PARTS:,} parts with everything that it refers to")
        if level > _MAX_LEVELS:
            raise ValueError(f"its schema has more than {_MAX_LEVELS} levels with everything that it refers to")
        if isinstance(part, list):
            pending += [(member, followed, level + 1) for member in part]
        if not isinstance(part, Mapping):
            continue
        pending += [(member, followed, level + 1) for name, member in part.items() if name not in ("$ref", "$defs")]
        ref = part.get("$ref", schema)
        if ref is schema or (isinstance(ref, str) and ref in followed):
            continue
        is_local = isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))
        if not is_local or (referenced := target(schema, ref)) is None:
            raise ValueError(f"its schema refers to {str(ref)[:100]!r}, which is no part of it")
        pending.append((referenced, followed | {ref}, level + 1))


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
