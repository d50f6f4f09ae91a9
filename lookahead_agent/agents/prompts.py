"""Texts for models: the descriptions of tools here, the messages of a run and the labels of calls in their modules."""

import json
from collections.abc import Iterable, Iterator, Mapping
from inspect import cleandoc
from typing import Any

from langchain_core.tools import BaseTool

from lookahead_agent.agents.run_record import conversation_before as conversation_before
from lookahead_agent.agents.run_record import conversation_with_results as conversation_with_results
from lookahead_agent.agents.run_record import is_question as is_question
from lookahead_agent.agents.run_record import own_words as own_words
from lookahead_agent.agents.run_record import result_blocks as result_blocks
from lookahead_agent.agents.run_record import since_last_question as since_last_question
from lookahead_agent.agents.tool_schemas import describe_function, with_all_fields
from lookahead_agent.agents.turns import lookahead_settings as lookahead_settings
from lookahead_agent.agents.turns import reply_limit as reply_limit
from lookahead_agent.agents.turns import warm as warm
from lookahead_agent.agents.written_calls import format_call as format_call


def describe_tools(tools: Iterable[BaseTool | Mapping[str, Any]]) -> str:
    """Describe each tool by name, arguments and description: `- name(argument: type): what it does`.

    Objects have their fields in the notation of JSON, and arguments and fields with a description have a line each.

    Raises:
        ConfigurationError: A tool's schema is too large, or refers to something outside of it.
    """
    return "\n".join(f"- {_describe(describe_function(tool))}" for tool in tools)


_MAX_LEVELS = 6  # Levels of objects and lists in the description of an argument
_MAX_VALUES = 30  # Values of an enum
_MAX_LINES = 40  # Lines of descriptions of arguments
_MAX_DETAIL_LENGTH = 500  # Characters of the description of an argument


def _describe(function: Mapping[str, Any]) -> str:
    parameters = _mapping(function.get("parameters"))
    properties = _mapping(parameters.get("properties"))
    required = parameters.get("required") or ()
    arguments = [
        f"{name}: {_kind(schema)}" + ("" if name in required else f" = {json.dumps(_default(schema))}")
        for name, schema in properties.items()
    ]
    lines = cleandoc(function.get("description") or "").splitlines()
    lines += [line for name, schema in properties.items() for line in _details(name, schema)][:_MAX_LINES]
    description = "\n  ".join(line for line in lines if line.strip())
    return f"{function['name']}({', '.join(arguments)}): {description}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _default(schema: Any) -> Any:
    return _mapping(schema).get("default")


def _kind(schema: Any, level: int = 1) -> str:
    """Return the type of an argument's values, with their fields and possible values."""
    schema = _mapping(schema)  # other schemas, such as true, allow any value
    if isinstance(values := schema.get("enum"), list):
        shown = " | ".join(json.dumps(value, ensure_ascii=False) for value in values[:_MAX_VALUES])
        return shown + (f" | {len(values) - _MAX_VALUES} more values" if len(values) > _MAX_VALUES else "")
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options:
            return " | ".join(dict.fromkeys(_kind(option, level) for option in options))
    if parts := schema.get("allOf"):
        merged = with_all_fields(schema)
        schema = merged if merged.get("properties") else {**_mapping(parts[0]), **schema, "allOf": None}
    kinds = schema.get("type")
    kinds = [str(kind) for kind in kinds] if isinstance(kinds, list) else [str(kinds)] if kinds else []
    fields = _mapping(schema.get("properties"))
    if not kinds:
        kinds = ["object"] if fields else ["array"] if _mapping(schema.get("items")) else ["any"]
    return " | ".join(_kind_of(kind, schema, fields, level) for kind in kinds)


def _kind_of(kind: str, schema: Mapping[str, Any], fields: Mapping[str, Any], level: int) -> str:
    if kind == "array" and isinstance(items := schema.get("items"), Mapping) and level < _MAX_LEVELS:
        inner = _kind(items, level + 1)
        return f"list of ({inner})" if " | " in inner and inner[0] != "{" else f"list of {inner}"
    if kind == "object" and fields and level < _MAX_LEVELS:
        required = schema.get("required") or ()
        listed = [
            f"{json.dumps(name, ensure_ascii=False)}: {_kind(field, level + 1)}"
            + ("" if name in required else " (optional)")
            for name, field in fields.items()
        ]
        return f"{{{', '.join(listed)}}}"
    if kind == "object" and level < _MAX_LEVELS and (values := _mapping(schema.get("additionalProperties"))):
        return f"object of {_kind(values, level + 1)}"
    return "list" if kind == "array" else kind


def _details(path: str, schema: Any, level: int = 1) -> Iterator[str]:
    """Yield a line for the description of an argument, and of each field in it."""
    schema = _mapping(schema)
    if isinstance(text := schema.get("description"), str) and text.strip():
        yield f"{path}: {' '.join(text.split())[:_MAX_DETAIL_LENGTH]}"
    if level == _MAX_LEVELS:
        return
    for name, field in _mapping(schema.get("properties")).items():
        yield from _details(f"{path}.{name}", field, level + 1)
    inner = [schema.get("items"), schema.get("additionalProperties")]
    for key in ("anyOf", "oneOf", "allOf"):
        inner += options if isinstance(options := schema.get(key), list) else []
    for part in inner:
        yield from _details(path, part, level + 1)
