"""The options of one call of the chat model: sampling, the form of the reply, and the tools that it may call."""

import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import isfunction
from typing import Annotated, Any, Literal, Self

from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lookahead_agent.engines.json_schema import check_schema, refers_to_itself, relocate, repair, target
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.texts import check_encodable


def _reject_bool(value: Any) -> Any:
    # pydantic would convert True to 1.
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


def _stop_texts(value: Any) -> Any:
    value = [value] if isinstance(value, str) else value
    if isinstance(value, (list, tuple)) and "" in value:
        raise ValueError("stop is one text or several, none of them empty")
    try:
        check_encodable(value, "stop")
    except ConfigurationError as error:
        raise ValueError(str(error)) from None
    return value


_MODES = ("auto", "none", "any", "required")
_CHOICES = (
    '"auto", "none", "any", "required", True, a tool\'s name, {"type": "function", "function": {"name": …}}, '
    '{"type": "tool", "name": …} or {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
)
_DISABLE = "disable_parallel_tool_use"  # part of a choice in Anthropic's format
_CHOICE_KEYS = frozenset({"type", "name", "function", "allowed_tools", "mode", "tools"})


def _check_thinking(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise ValueError("thinking is True, False or None: thinking_tokens is the budget of tokens")
    return value


Thinking = Annotated[bool | None, BeforeValidator(_check_thinking)]
_Number = BeforeValidator(_reject_bool)
_INT32 = 2**31  # the engine stores these values in 32 bits, and a seed in 64

NO_LIMIT = _INT32 - 1  # `max_tokens` of a reply that may fill the context
MaxTokens = Annotated[int, Field(ge=1, lt=_INT32), _Number]
ThinkingTokens = Annotated[int, Field(ge=0, lt=_INT32), _Number]


def check_budget(thinking: bool | None, budget: int | None) -> None:
    """Raise ValueError if the switch of the thinking contradicts a budget that is set beside it."""
    if thinking is not None and budget is not None and bool(budget) is not thinking:
        raise ValueError(f"thinking={thinking} contradicts thinking_tokens={budget}: leave one of the two out")


class SamplingArguments(BaseModel):
    """Sampling and the end of a reply, with the same bounds for fields, call arguments and server requests."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False), _Number] | None = None
    """Sampling temperature; 0 takes the likeliest token. None: the value that the model's makers recommend."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), _Number] | None = None
    """Probability mass to sample from; None: the value that the model's makers recommend."""
    top_k: Annotated[int, Field(ge=0, lt=_INT32), _Number] | None = None
    """Number of likeliest tokens to sample from, 0 for all; None: the value that the model's makers recommend."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _Number] | None = None
    """Makes sampling repeatable under policies that do not depend on timing (off, exact)."""
    max_tokens: MaxTokens | None = None
    """Maximum number of tokens of a reply; None: what the prompt leaves of the context."""
    stop: (
        Annotated[
            list[Annotated[str, Field(strict=True)]],
            Field(fail_fast=True),
            BeforeValidator(_stop_texts, json_schema_input_type=str | list[str]),
        ]
        | None
    ) = None
    """Text or texts that end the reply, which does not include them."""

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Validate options; raises ConfigurationError."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                known = ", ".join(sorted(cls.model_fields))
                raise ConfigurationError(f"a call takes no argument {name!r}; it takes {known}") from error
            raise ConfigurationError(f"{name}={reprlib.repr(problem['input'])}: {problem['msg']}") from error


class CallOptions(SamplingArguments):
    """Keyword arguments of a call, validated as the constructor's are."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    policy: Any = None
    """Policy of this call."""
    tools: Annotated[list[dict[str, Any]], BeforeValidator(lambda value: openai_tools(value or ()))] = Field(
        default_factory=list
    )
    """Tools in OpenAI's format, or values that convert to it."""
    tool_choice: Any = None
    """A choice as `bind_tools` takes it; once validated, "required" if the reply must call one of `tools`, or None."""
    parallel_tool_calls: bool | None = None
    """Whether a reply may call several tools; None: the model decides, but a required call is a single one."""
    response_format: dict[str, Any] | None = None
    """`{"type": "json_schema", "json_schema": {"name": …, "schema": …}}`, `{"type": "json_object"}`, with or without a
    `schema`, or `{"type": "text"}`."""
    thinking: Thinking = None
    """Whether the model thinks before its answer; None: the model's field decides."""
    thinking_tokens: ThinkingTokens | None = None
    """Most tokens of the thinking; None: the model's field decides."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the model's chat template, such as `enable_thinking`."""
    node: str | None = None
    """Name or path of the node that selects the policy and that metadata names; None: the calling LangGraph node."""
    action_markers: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that open an action region, such as "Plan:": after the first one, only the target writes."""

    _form: dict[str, Any] | None = PrivateAttr(None)
    _structured: dict[str, Any] | None = PrivateAttr(None)

    @field_validator("tools", "response_format", "template_arguments", "node", "action_markers")
    @classmethod
    def _check_encodable(cls, value: Any, info: ValidationInfo) -> Any:
        check_encodable(value, str(info.field_name))
        return value

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        check_budget(self.thinking, self.thinking_tokens)
        return self

    @model_validator(mode="after")
    def _build_constraint(self) -> Self:
        if "tool_choice" in self.model_fields_set:
            self.tool_choice, self.parallel_tool_calls = split_choice(self.tool_choice, self.parallel_tool_calls)
            self.tools, self.tool_choice = choose_tools(self.tools, self.tool_choice)
        form = _constraint(self.response_format) if self.response_format is not None else None
        if self.tool_choice is not None and form is not None:
            raise ConfigurationError("a reply cannot be a tool call and in a response_format at once")
        if self.tool_choice is not None and not self.tools:
            raise ConfigurationError("a tool call is required, but there are no tools")
        if form is None and self.tool_choice is None:
            return self
        # Check each schema's size before it is copied, and then the size of the whole.
        for schema in ((form or {}).get("json"), *(tool["function"].get("parameters") for tool in self.tools)):
            check_schema(schema or {})
        self._form = self._structured = form
        if self.tools:
            calls: dict[str, Any] = {"anyOf": _call_schemas(self.tools, "/anyOf")}
            if self.parallel_tool_calls:
                calls = {"type": "array", "items": {"anyOf": _call_schemas(self.tools, "/items/anyOf")}, "minItems": 1}
            check_schema(calls)
            self._structured = {"json": calls}
        return self

    @property
    def form(self) -> dict[str, Any] | None:
        """The constraint of `response_format`; None: free text."""
        return self._form

    @property
    def constraint(self) -> dict[str, Any] | None:
        """The constraint for `Sampling.structured`: a call if there are tools, else the form; None: free text."""
        return self._structured


def openai_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert tools, functions, classes, or dictionaries of OpenAI, Anthropic or Bedrock to OpenAI's format."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ConfigurationError("tools is a list of tools")
    return [_openai_tool(tool) for tool in tools]


def _openai_tool(tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    # A JSON schema has a type too, and OpenAI's newer API puts the function's fields beside the type.
    if kind == "function" and "function" not in tool:
        tool = {key: value for key, value in tool.items() if key != "type"}
    elif kind not in (None, "function") and "title" not in tool and "input_schema" not in tool:
        raise ConfigurationError(
            f"a tool of the type {kind!r} is not a function that this model can call: bind a function of your own"
        )
    try:
        converted = _convert(tool)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(f"this is not a tool that a model can call: {reason[0]}") from error
    function = converted.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigurationError("a tool needs a function with a name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ConfigurationError(f"the parameters of the tool {function['name']!r} are not a JSON schema")
    return converted


def _convert(tool: Any) -> dict[str, Any]:
    """Convert a tool as LangChain does, but keep references: LangChain replaces them by their targets, which may be
    huge, and drops recursive ones."""
    schema = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
    if isinstance(tool, BaseTool) and isinstance(schema, dict):
        with suppress(RecursionError):  # `check_schema` refuses it
            schema = repair(schema)
        parameters = {"properties": {}, **_parameters(schema), "type": "object"}
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        return {"type": "function", "function": function}
    converted: dict[str, Any] = convert_to_openai_tool(tool)
    if isfunction(tool):
        schema = StructuredTool.from_function(tool, description="…").tool_call_schema
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        full_schema = schema.model_json_schema()
        if refers_to_itself(full_schema):
            converted["function"]["parameters"] = _parameters(full_schema)
    return converted


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as function parameters, which must be an object and not a reference to one."""
    root = target(schema, schema.get("$ref", "#"))
    described = {"title", "description", "$ref"}
    parts = {**schema, **root} if isinstance(root, Mapping) else schema
    return {key: value for key, value in parts.items() if key not in described}


def choose_tools(tools: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], Literal["required"] | None]:
    """Return the tools that a reply may call under a `tool_choice`, and "required" if it must call one."""
    mode, names = _parse_choice(choice)
    if names is not None:
        known = [tool["function"]["name"] for tool in tools]
        for name in names:
            if name not in known:
                raise ConfigurationError(f"tool_choice {name!r} is not one of the tools ({', '.join(known)})")
        tools = [tool for tool, name in zip(tools, known, strict=True) if name in names]
    return [] if mode == "none" else tools, "required" if mode == "required" else None


def split_choice(choice: Any, parallel_tool_calls: bool | None) -> tuple[Any, bool | None]:
    """Return a `tool_choice` without Anthropic's `disable_parallel_tool_use`, and `parallel_tool_calls` by it.

    Raises:
        ConfigurationError: It is not a boolean, or contradicts `parallel_tool_calls`.
    """
    if not isinstance(choice, Mapping) or _DISABLE not in choice:
        return choice, parallel_tool_calls
    disable = choice[_DISABLE]
    if not isinstance(disable, bool) or parallel_tool_calls is disable:
        raise ConfigurationError(f"tool_choice.{_DISABLE} is true or false, and parallel_tool_calls its contrary")
    return {key: value for key, value in choice.items() if key != _DISABLE}, not disable


def _parse_choice(choice: Any) -> tuple[Literal["auto", "none", "required"], list[str] | None]:
    """Return the mode of a choice, and the names of the tools that it allows; None: all."""
    if isinstance(choice, Mapping) and (unknown := choice.keys() - _CHOICE_KEYS):
        raise ConfigurationError(f"tool_choice has {min(map(repr, unknown))[:80]}, but is {_CHOICES}")
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
            named = [_tool_name(tool) for tool in allowed.get("tools") or ()]
            if named and None not in named and allowed.get("mode", "auto") in _MODES:
                return _parse_choice(allowed.get("mode", "auto"))[0], [name for name in named if name is not None]
        case str() if choice:
            return "required", [choice]
        case _ if (name := _tool_name(choice)) is not None:
            return "required", [name]
    raise ConfigurationError(f"tool_choice is {_CHOICES}")


def _tool_name(choice: Any) -> str | None:
    match choice:
        case {"type": "function", "function": {"name": str() as name}} | {
            "type": "function" | "tool",
            "name": str() as name,
        }:
            return name
        case {"function": {"name": str() as name}, **rest} if "type" not in rest:
            return name
    return None


def _constraint(response_format: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert OpenAI's `response_format` to a constraint for `Sampling.structured`; None: free text."""
    match response_format:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return {"json_object": True}
        # Servers of other makers take a schema here.
        case {"type": "json_object", "schema": dict() as schema, **rest} if not rest:
            return {"json": schema}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema, **described}, **rest} if not (
            rest or described.keys() - {"name", "description", "strict"}
        ):
            return {"json": schema}
    raise ConfigurationError(
        'response_format is {"type": "text"}, {"type": "json_object"}, {"type": "json_object", "schema": …} or '
        '{"type": "json_schema", "json_schema": {"name": …, "schema": …}}, '
        f"not an object with {', '.join(map(repr, _paths(response_format)))}"
    )


def _paths(fields: Mapping[str, Any]) -> list[str]:
    inner = fields.get("json_schema")
    names = [f"json_schema.{name}" for name in inner] if isinstance(inner, Mapping) else []
    return [str(name)[:80] for name in (*fields, *names)][:20]


def _call_schemas(tools: Sequence[Mapping[str, Any]], pointer: str) -> list[dict[str, Any]]:
    """Return the schema of a call of each tool; `pointer` is the JSON pointer of the returned list."""
    return [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": relocate(
                    tool["function"].get("parameters") or {"type": "object"}, f"{pointer}/{index}/properties/arguments"
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
