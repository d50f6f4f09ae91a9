"""LangChain messages to what chat templates take, and OpenAI's messages to LangChain's."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    InvalidToolCall,
    ToolCall,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call

from lookahead_agent.engines.chat_template import FINISHED, continues
from lookahead_agent.errors import ConfigurationError, check_encodable
from lookahead_agent.generation.tool_calls import UNREADABLE

THINKING_KEY = "reasoning_content"
"""Where LangChain keeps a reply's thinking: a message's `content_blocks` show it as a block of type "reasoning"."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
}
"""Roles that a `ChatMessage` may have, and what templates call them."""

_ENDED = frozenset({"stop", "tool_calls", "end_turn", "stop_sequence", "STOP"})
"""Reasons for which a model of ours or of others ends a reply itself; one that was cut off can be continued."""

# Blocks of a reply's content that its message also has in other places.
_ELSEWHERE = frozenset({"reasoning", "thinking", "redacted_thinking", "tool_call_chunk"})
_CALLS = frozenset({"tool_use", "function_call", "tool_call", "invalid_tool_call"})


def template_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's format, with text content and tool-call arguments as mappings."""
    # The thinking of earlier replies goes into `reasoning_content`, which a template uses or leaves out as it likes. A
    # call that could not be read becomes text of its message, as the model wrote it: templates take whole calls only.
    if not messages:
        raise ConfigurationError("there is no message to reply to")
    converted: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        made = _converted(message, f"message {number}")
        for part in made:
            check_encodable(part, f"message {number}")
        converted += made
    return converted


def _converted(message: BaseMessage, name: str) -> list[dict[str, Any]]:
    """A message as a template takes it; several, where its content holds results of tools."""
    role = _role(message, name)
    if isinstance(message, AIMessage):
        return [_reply(message, name)]
    results, content = _without_results(message.content) if role == "user" else ([], message.content)
    made: dict[str, Any] = {"role": role, "content": _text(content, name, "\n")}
    if message.name:
        made["name"] = message.name
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    if isinstance(message, FunctionMessage):
        made["tool_call_id"] = f"function_{message.name}"
    return [*results, *([] if results and not made["content"] else [made])]


def _role(message: BaseMessage, name: str) -> str:
    if isinstance(message, (ToolMessage, FunctionMessage)):
        return "tool"
    kind = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk")
    if (role := _ROLES.get(kind.lower())) is not None:
        return role
    told = f"the role {message.role!r}" if isinstance(message, ChatMessage) else f"the type {type(message).__name__}"
    raise ConfigurationError(f"{name} has {told}; the model knows system, user, assistant and tool messages")


def _reply(message: AIMessage, name: str) -> dict[str, Any]:
    calls, unread = _calls(message)
    content = message.content
    if not isinstance(content, str):
        content = [block for block in content if _kind(block) not in _CALLS | _ELSEWHERE]
    said = [_text(content, name, ""), str(message.additional_kwargs.get("refusal") or ""), *map(_as_written, unread)]
    made: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, said))}
    if message.name:
        made["name"] = message.name
    if calls:
        made["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in calls
        ]
    if thinking := thinking_of(message):
        made["reasoning_content"] = thinking
    if message.response_metadata.get("finish_reason", message.response_metadata.get("stop_reason")) in _ENDED:
        made[FINISHED] = True
    return made


def _calls(message: AIMessage) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    found = [_call(call["name"], call["args"], call["id"]) for call in message.tool_calls]
    found += message.invalid_tool_calls
    known = {call["id"] for call in found}
    for block in message.content:
        # Most replies have their calls here once more.
        if not isinstance(block, dict) or _kind(block) not in _CALLS:
            continue
        if known.isdisjoint((block.get("id"), block.get("call_id"))):
            arguments = next((block[key] for key in ("input", "args", "arguments") if key in block), None)
            found.append(_call(block.get("name"), arguments, block.get("call_id") or block.get("id")))
    old = message.additional_kwargs.get("function_call")
    if isinstance(old, Mapping) and not found:
        # OpenAI's older format, which has no identities.
        found.append(_call(old.get("name"), old.get("arguments"), f"function_{old.get('name')}"))
    return _parted(found)


def _parted(calls: Sequence[ToolCall | InvalidToolCall]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    read = [call for call in calls if call["type"] == "tool_call"]
    return read, [call for call in calls if call["type"] == "invalid_tool_call"]


def _as_written(call: InvalidToolCall) -> str:
    name, arguments = call.get("name") or "", (call.get("args") or "").removeprefix(UNREADABLE)
    if not name or json.dumps(name) in arguments:
        return arguments
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _call(name: Any, arguments: Any, identifier: Any) -> ToolCall | InvalidToolCall:
    """A call that can be answered, if its arguments are a mapping that can be encoded and it has a name."""
    identifier = None if identifier is None else str(identifier)
    reason = "the call has no name"
    if isinstance(name, str) and name:
        try:
            read = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
            if not isinstance(read, Mapping):
                raise TypeError("the arguments are not a JSON object")
            check_encodable(read, "arguments")
            return tool_call(name=name, args=dict(read), id=identifier)
        except (ValueError, TypeError, RecursionError, ConfigurationError) as error:
            reason = str(error)
    text = arguments if isinstance(arguments, str) else "" if arguments is None else json.dumps(arguments, default=str)
    name = name if isinstance(name, str) else None
    return invalid_tool_call(name=name, args=text, id=identifier, error=reason)


def from_openai(fields: Mapping[str, Any]) -> BaseMessage:
    """A message in OpenAI's format, with whatever earlier replies have in it."""
    # Calls that cannot be read, which clients send back as they got them, become `invalid_tool_calls`.
    rest = {**fields, "content": fields.get("content") or ""}
    own = rest.get("role") in ("assistant", "ai")
    given = (rest.pop("tool_calls", None) or []) if own else []
    if not isinstance(given, list):
        raise ConfigurationError("a message cannot be read: its tool_calls are no list")
    thinking = (rest.pop(THINKING_KEY, None) or rest.pop("reasoning", None)) if own else None
    try:
        (message,) = convert_to_messages([rest])
    except (ValueError, NotImplementedError, TypeError, KeyError) as error:
        raise ConfigurationError(f"a message cannot be read: {' '.join(str(error).split())[:300]}") from error
    if isinstance(message, AIMessage):
        calls, unread = _parted([_call_of(call) for call in given])
        message.tool_calls += calls
        message.invalid_tool_calls += unread
        if isinstance(thinking, str):
            message.additional_kwargs[THINKING_KEY] = thinking
    return message


def _call_of(call: Any) -> ToolCall | InvalidToolCall:
    """A call in OpenAI's format, or in LangChain's."""
    given = call if isinstance(call, Mapping) else {}
    function = given.get("function")
    if not isinstance(function, Mapping):
        function = given
    name, arguments = function.get("name"), function.get("arguments", function.get("args"))
    if name and (arguments is None or (isinstance(arguments, str) and not arguments.strip())):
        arguments = {}  # many servers and clients write none as no text
    return _call(name, arguments, given.get("id"))


def conversation(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages to which a reply is to be written; a last one of the model's own is the beginning of that reply."""
    # A reply that its model has ended is none: in a graph of several agents it is what another one said.
    converted = template_messages(messages)
    if isinstance(last := messages[-1], AIMessage):
        if any(_calls(last)):
            raise ConfigurationError("the last message calls tools: append a message with the result of each call")
        if continues(converted) and not converted[-1]["content"] and thinking_of(last):
            raise ConfigurationError("the last message is all thinking, which no template continues: leave it out")
    return without_empty_replies(converted)


def without_empty_replies(converted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a template without empty ones of the model's own at the end, which begin no reply."""
    left = list(converted)
    while left and left[-1]["role"] == "assistant" and not left[-1]["content"] and not left[-1].get("tool_calls"):
        left.pop()
    if not left:
        raise ConfigurationError("there is no message to reply to")
    return left


def thinking_of(message: AIMessage) -> str:
    """The thinking of a reply."""
    blocks = [block for block in message.content if isinstance(block, dict)]
    # "thinking" is what replies of Anthropic's models have.
    stated = "".join(str(block.get(kind, "")) for kind in ("reasoning", "thinking") for block in blocks)
    return stated or str(message.additional_kwargs.get(THINKING_KEY) or "")


def _without_results(content: Any) -> tuple[list[dict[str, Any]], Any]:
    """Results of tools that stand in a user's message, as Anthropic's API has them, and the rest of it."""
    if isinstance(content, str):
        return [], content
    made: list[dict[str, Any]] = []
    for block in content:
        if _kind(block) == "tool_result":
            text = _text(block.get("content") or "", "a tool's result", "\n")
            made.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id") or "")})
    return made, [block for block in content if _kind(block) != "tool_result"]


def _text(content: Any, name: str, between: str) -> str:
    """The text of a content, or of its blocks; errors call the message `name`."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    kinds: set[str] = set()
    for block in content:
        match block:
            case (
                (str() as text)
                | {"type": "text" | "input_text" | "output_text", "text": str() as text}
                | {"type": "refusal", "refusal": str() as text}
            ):
                texts.append(text)
            case {"text": str() as text, **rest} if "type" not in rest:
                texts.append(text)
            case {"json": value, **rest} if rest.get("type", "json") == "json":
                texts.append(json.dumps(value, default=str))
            case _:
                kinds.add(str(block.get("type", "?")) if isinstance(block, dict) else type(block).__name__)
    if kinds:
        raise ConfigurationError(
            f"this model reads only text; {name} has content of the type {', '.join(sorted(kinds))}"
        )
    return between.join(texts)
