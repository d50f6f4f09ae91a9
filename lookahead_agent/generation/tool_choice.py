"""The tools of a call, and which of them a reply may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isfunction
from typing import Any, Literal

from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from lookahead_agent.engines.json_schema import refers_to_itself, subschemas, target
from lookahead_agent.errors import ConfigurationError

_WORDS = ("auto", "none", "any", "required")
_FORMS = (
    '"auto", "none", "any", "required", True, a tool\'s name, {"type": "function", "function": {"name": …}}, '
    '{"type": "tool", "name": …} or {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
)


def openai_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools, functions, classes, or dictionaries of OpenAI, Anthropic or Bedrock, in OpenAI's format.

    Raises:
        ConfigurationError: One is no function.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ConfigurationError("tools is a list of tools")
    return [_openai_tool(tool) for tool in tools]


def _openai_tool(tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    # A JSON schema has a type too, and OpenAI's newer API leaves the function's fields beside it.
    if kind == "function" and "function" not in tool:
        tool = {key: value for key, value in tool.items() if key != "type"}
    elif kind not in (None, "function") and "title" not in tool and "input_schema" not in tool:
        raise ConfigurationError(
            f"a tool of the type {kind!r} is no function that this model can call: bind a function of your own"
        )
    try:
        converted = _converted(tool)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(f"this is no tool that a model can call: {reason[0]}") from error
    function = converted.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigurationError("a tool needs a function with a name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ConfigurationError(f"the parameters of the tool {function['name']!r} are no JSON schema")
    return converted


def _converted(tool: Any) -> dict[str, Any]:
    """A tool as LangChain converts it, but for references: LangChain puts in their place what they refer to, which may
    be very much, and nothing where that refers to itself."""
    schema = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
    if isinstance(tool, BaseTool) and isinstance(schema, dict) and any("$ref" in part for part in subschemas(schema)):
        function = {"name": tool.name, "description": tool.description, "parameters": _parameters(schema)}
        return {"type": "function", "function": function}
    converted: dict[str, Any] = convert_to_openai_tool(tool)
    if isfunction(tool):
        schema = StructuredTool.from_function(tool, description="…").tool_call_schema
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        whole = schema.model_json_schema()
        if refers_to_itself(whole):
            converted["function"]["parameters"] = _parameters(whole)
    return converted


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema as the parameters of a function, which are an object and no reference to one."""
    root = target(schema, schema.get("$ref", "#"))
    described = {"title", "description", "$ref"}
    parts = {**schema, **root} if isinstance(root, Mapping) else schema
    return {key: value for key, value in parts.items() if key not in described}


def select_tools(tools: list[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """The tools that a reply may call by a `tool_choice` in any of the usual forms.

    Raises:
        ConfigurationError: The choice has no known form, or names a tool that is not among them.
    """
    mode, names = _read(choice)
    if mode == "none":
        return []
    if names is None:
        return tools
    known = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"tool_choice {name!r} is not one of the tools ({', '.join(known)})")
    return [tool for tool, name in zip(tools, known, strict=True) if name in names]


def required_choice(choice: Any) -> Literal["required"] | None:
    """Whether a reply must be a tool call; raises ConfigurationError if the choice has no known form."""
    return "required" if _read(choice)[0] == "required" else None


def _read(choice: Any) -> tuple[Literal["auto", "none", "required"], list[str] | None]:
    """The demand of a choice, and the tools that it allows; None: all."""
    match choice:
        case None | False | "auto" | {"type": "auto"}:
            return "auto", None
        case "none" | {"type": "none"}:
            return "none", None
        case True | "any" | "required" | {"type": "any" | "required"}:
            return "required", None
        case {"type": "allowed_tools", "allowed_tools": dict() as allowed} | (
            {"type": "allowed_tools", "tools": list()} as allowed
        ):
            named = [_named(tool) for tool in allowed.get("tools") or ()]
            if named and None not in named and allowed.get("mode", "auto") in _WORDS:
                return _read(allowed.get("mode", "auto"))[0], [name for name in named if name is not None]
        case str() if choice:
            return "required", [choice]
        case _ if (name := _named(choice)) is not None:
            return "required", [name]
    raise ConfigurationError(f"tool_choice is {_FORMS}")


def _named(choice: Any) -> str | None:
    """The name of a tool in a choice."""
    match choice:
        case {"type": "function", "function": {"name": str() as name}} | {
            "type": "function" | "tool",
            "name": str() as name,
        }:
            return name
        case {"function": {"name": str() as name}, **rest} if "type" not in rest:
            return name
    return None
