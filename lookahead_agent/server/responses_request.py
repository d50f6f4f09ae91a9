"""Requests of OpenAI's `/v1/responses`, in the types of OpenAI's SDK, and their form for `/v1/chat/completions`.

The SDK's import takes seconds, so that the application imports this module with the first such request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from openai.types.responses import (
    FunctionTool,
    ResponseFormatTextJSONSchemaConfig,
    ToolChoiceAllowed,
    ToolChoiceFunction,
)
from openai.types.shared import Reasoning
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from lookahead_agent.generation.call_options import MaxTokens, ThinkingTokens
from lookahead_agent.server.body import validate
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.server.protocol import MAX_TOOLS, ChatRequestBody, Sampled

T = TypeVar("T", bound=BaseModel)
Item = dict[str, Any]

_MAX_ITEMS = 10_000
_SHARED = frozenset(Sampled.model_fields) - {"n", "max_tokens", "response_format"}
_INSTEAD = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of `/v1/chat/completions` that have another name here."""
_TOOL_OPTIONS = ("allowed_callers", "async_", "defer_loading", "output_schema")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # OpenAI's limits: entries, and characters of each
_ITEMS = "a message, a reasoning item, a function_call or a function_call_output"


def _refuse(name: str, problem: str) -> RefusedError:
    return RefusedError(400, f"{name}: {problem}", param=name)


def _read(model: type[T], value: Any, name: str) -> T:
    """Validate a value of one of the SDK's types, which ignore unknown fields; raises RefusedError."""
    if not isinstance(value, dict):
        raise _refuse(name, "Input should be an object")
    parsed = validate(model, value, name)
    if unknown := parsed.model_extra:
        raise _refuse(name, f"there is no field {min(unknown)[:80]!r}")
    return parsed


def _read_input(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_ITEMS:
        raise _refuse("input", f"Input should be a text, or a list of 1 to {_MAX_ITEMS} items")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise _refuse(f"input.{index}", "Input should be an object")
    return value


def _read_tools(value: Any) -> list[FunctionTool]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise _refuse("tools", f"Input should be a list of at most {MAX_TOOLS} tools")
    tools = []
    for index, tool in enumerate(value):
        name = f"tools.{index}"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise _refuse(name, f"the type {str(kind)[:80]!r} is not supported: give a tool of the type 'function'")
        tools.append(_read(FunctionTool, tool, name))
        for option in _TOOL_OPTIONS:
            if getattr(tools[-1], option, None) not in (None, False, ["direct"]):
                raise _refuse(name, f"{option.rstrip('_')} is not supported")
    return tools


def _read_tool_choice(value: Any) -> Any:
    """Check a choice of the API's own form, since the response has it too; it differs from that of chats."""
    forms: dict[str, type[BaseModel]] = {"function": ToolChoiceFunction, "allowed_tools": ToolChoiceAllowed}
    if isinstance(value, dict):
        if (form := forms.get(str(value.get("type")))) is None:
            raise _refuse(
                "tool_choice", f"the type {str(value.get('type'))[:80]!r} is not supported: give a function's name"
            )
        _read(form, value, "tool_choice")
    return value


def _read_reasoning(value: Any) -> Reasoning:
    reasoning = _read(Reasoning, value, "reasoning")
    for name in ("context", "mode"):
        if getattr(reasoning, name, None) not in (None, "auto", "standard"):
            raise _refuse(f"reasoning.{name}", "this is not supported: the chat template decides")
    if "concise" in (reasoning.summary, reasoning.generate_summary):
        raise _refuse("reasoning.summary", "'concise' is not supported: 'auto' and 'detailed' give the whole thinking")
    return reasoning


def _read_text(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() - {"format", "verbosity"}:
        raise _refuse("text", "Input should be an object with a format")
    if value.get("verbosity") is not None:
        raise _refuse("text.verbosity", "this is not supported")
    chosen = value.get("format")
    match chosen:
        case None | {"type": "text" | "json_object"} if len(chosen or "?") == 1:
            pass
        case {"type": "json_schema"}:
            _read(ResponseFormatTextJSONSchemaConfig, chosen, "text.format")
        case _:
            raise _refuse(
                "text.format",
                'it is {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": …, "schema": …}',
            )
    return value


def _read_metadata(value: Any) -> Any:
    if isinstance(value, dict) and (
        len(value) > _MAX_METADATA or any(len(key) > _MAX_KEY or len(str(value[key])) > _MAX_VALUE for key in value)
    ):
        limits = f"at most {_MAX_METADATA} keys of {_MAX_KEY} characters, with values of {_MAX_VALUE}"
        raise _refuse("metadata", f"there are {limits}")
    return value


class ResponseRequestBody(Sampled):
    """Body of `/v1/responses`."""

    input: Annotated[str | list[dict[str, Any]], BeforeValidator(_read_input)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Annotated[list[FunctionTool], BeforeValidator(_read_tools)] = Field(default_factory=list)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | dict[str, Any] | None, BeforeValidator(_read_tool_choice)
    ] = None
    parallel_tool_calls: bool | None = None
    text: Annotated[dict[str, Any], BeforeValidator(_read_text)] = Field(default_factory=dict)
    reasoning: Annotated[Reasoning, BeforeValidator(_read_reasoning)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_read_metadata)] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # thinking is never encrypted
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    top_logprobs: Literal[0] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_tokens: ThinkingTokens | None = None
    thinking_token_budget: Literal[-1] | ThinkingTokens | None = None  # vLLM's name, as for chats

    @model_validator(mode="before")
    @classmethod
    def _name_the_field(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            for name in fields.keys() & (_INSTEAD.keys() | {"n"}):
                if fields[name] is not None:
                    other = f"here it is {_INSTEAD[name]}" if name in _INSTEAD else "a response has one reply"
                    raise _refuse(name, f"there is no field {name!r}: {other}")
        return fields

    @property
    def items(self) -> list[Item]:
        """The input as a list of items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    @property
    def has_summary(self) -> bool:
        """Whether the thinking is the summary of reasoning items, and not their content."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    def chat_body(self, earlier: Sequence[Item]) -> ChatRequestBody:
        """Return the request of `/v1/chat/completions` that asks for the same, after these items of the conversation.

        Raises RefusedError with the item at fault.
        """
        messages = _chat_messages([*earlier, *self.items], len(earlier))
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields = {name: getattr(self, name) for name in _SHARED & self.model_fields_set}
        fields |= {"messages": messages, "max_tokens": self.max_output_tokens, "tool_choice": self.tool_choice}
        for name in ("parallel_tool_calls", "thinking_tokens", "thinking_token_budget"):
            fields[name] = getattr(self, name)
        fields["stream_options"] = None  # the last event always has the usage
        keys = ("name", "description", "parameters", "strict")
        fields["tools"] = [
            {"type": "function", "function": {key: getattr(tool, key, None) for key in keys}} for tool in self.tools
        ]
        effort = self.reasoning.effort if self.reasoning is not None else None
        thinking = {} if effort is None else {"enable_thinking": effort != "none"}
        fields["chat_template_kwargs"] = thinking | (self.chat_template_kwargs or {})
        if (chosen := self.text.get("format")) is not None:
            kind = chosen["type"]
            schema = {key: value for key, value in chosen.items() if key != "type"}
            fields["response_format"] = {"type": kind} | ({kind: schema} if kind == "json_schema" else {})
        return validate(ChatRequestBody, fields)


def _chat_messages(items: Sequence[Item], earlier: int) -> list[dict[str, Any]]:
    """Convert items to messages: reasoning, an answer and the calls after it become one message of the assistant."""
    messages: list[dict[str, Any]] = []
    waiting: set[str] = set()  # calls without their output
    for index, item in enumerate(items):
        name = f"input.{index - earlier}"
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
        match item:
            case {"role": "user" | "system" | "developer" | "assistant" as role, "content": content, **rest} if (
                rest.get("type") in (None, "message")
            ):
                content = _content(content, f"{name}.content", may_refuse=role == "assistant")
                if role == "assistant" and last and "content" not in last and "tool_calls" not in last:
                    last["content"] = content
                else:
                    messages.append({"role": role, "content": content})
            case {"type": "reasoning"}:
                thinking = _thinking(item, name)
                if last and last.keys() <= {"role", "reasoning"}:
                    last["reasoning"] = "\n\n".join(filter(None, (last["reasoning"], thinking)))
                else:
                    messages.append({"role": "assistant", "reasoning": thinking})
            case {"type": "function_call", "call_id": str(call_id), "name": str(called), "arguments": str(arguments)}:
                if not call_id or call_id in waiting:
                    raise _refuse(f"{name}.call_id", f"a call before it has the call_id {call_id[:80]!r} too")
                waiting.add(call_id)
                if not last:
                    messages.append(last := {"role": "assistant"})
                call = {"id": call_id, "type": "function", "function": {"name": called, "arguments": arguments}}
                last.setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
                if call_id not in waiting:
                    problem = f"no function_call before it has the call_id {call_id[:80]!r} and waits for an output"
                    raise _refuse(f"{name}.call_id", problem)
                waiting.remove(call_id)
                content = _content(output, f"{name}.output")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case {"type": "message" | "function_call" | "function_call_output" as kind}:
                fields = {
                    "message": "a role (user, system, developer or assistant) and content",
                    "function_call": "a call_id, a name and arguments, each a text",
                    "function_call_output": "a call_id and an output",
                }
                raise _refuse(name, f"the item needs {fields[kind]}")
            case {"type": kind}:
                raise _refuse(name, f"the type {str(kind)[:80]!r} is not supported: give {_ITEMS}")
            case _:
                raise _refuse(name, f"the item has no type: give {_ITEMS}")
    return messages


def _content(content: Any, name: str, *, may_refuse: bool = False) -> str | list[dict[str, Any]]:
    """Return a content as text or as text parts; raises RefusedError for images and files."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refuse(name, "Input should be a text or a list of parts")
    parts = []
    for index, part in enumerate(content):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
                parts.append({"type": "text", "text": text})
            case {"type": "refusal", "refusal": str(text)} if may_refuse:
                parts.append({"type": "refusal", "refusal": text})
            case {"type": str(kind)} if kind not in _TEXT_PARTS:
                raise _refuse(f"{name}.{index}", f"the type {kind[:80]!r} is not supported: this model reads only text")
            case _:
                raise _refuse(f"{name}.{index}", "the part needs a type and a text")
    return parts


def _thinking(item: Item, name: str) -> str:
    """Return the text of a reasoning item: its content, else its summary."""
    texts: dict[str, list[str]] = {"content": [], "summary": []}
    for field, found in texts.items():
        parts = item.get(field) or []
        if not isinstance(parts, list):
            raise _refuse(f"{name}.{field}", "Input should be a list of parts")
        for index, part in enumerate(parts):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise _refuse(f"{name}.{field}.{index}", "the part needs a type and a text")
            found.append(part["text"])
    return "\n\n".join(texts["content"] or texts["summary"])
