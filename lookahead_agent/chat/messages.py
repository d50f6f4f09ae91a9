"""Converts LangChain messages for chat templates, and OpenAI's messages to LangChain's."""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call

from lookahead_agent.engines.chat_template import FINISHED, continues
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.tool_calls import UNREADABLE
from lookahead_agent.system.texts import check_encodable

THINKING_KEY = "reasoning_content"
"""Key of `additional_kwargs` with a reply's thinking: `content_blocks` shows it as a block of type "reasoning"."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
}
"""Template roles, by message type and by the role of a `ChatMessage`."""

_END_REASONS = frozenset({"stop", "tool_calls", "end_turn", "stop_sequence", "STOP"})
"""Finish reasons, here and of other providers, of replies that the model ended; only others can be continued."""

_NO_QUESTION = "there is no message to reply to: give a user message with text"
_INVISIBLE = frozenset({"Cc", "Cf", "Zl", "Zp", "Zs"})  # Unicode's categories of control characters and spaces
_MAX_DETAIL = 80  # Characters of a file's name in a note

# Content blocks that are not text; the first group repeats other fields of the message.
_REPEATED_BLOCKS = frozenset({"reasoning", "thinking", "redacted_thinking", "tool_call_chunk"})
_CALL_BLOCKS = frozenset({"tool_use", "function_call", "tool_call", "invalid_tool_call"})


def template_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert messages to OpenAI's format, with text as content and mappings as tool-call arguments."""
    # The thinking of earlier replies goes into `reasoning_content`, which a template may use or ignore. Templates take
    # valid calls only, so an invalid call becomes text of its message, as the model wrote it.
    if not messages:
        raise ConfigurationError(_NO_QUESTION)
    # Content other than text would end every later run of a thread: only instructions and a question raise an error.
    question = _question_index(messages)
    converted: list[tuple[str, dict[str, Any]]] = []
    for index, message in enumerate(messages):
        name, strict = f"message {index + 1}", index == question or isinstance(message, SystemMessage)
        converted += [(name, part) for part in _convert(message, name, strict=strict)]
    for name, part in converted:
        if not all(isinstance(text, str) and text.isascii() for text in part.values()):
            check_encodable(part, name)
    return [part for _, part in converted]


def _question_index(messages: Sequence[BaseMessage]) -> int | None:
    """Return the index of the question that the reply answers; None if an assistant message has followed it."""
    for index in reversed(range(len(messages))):
        # The reply continues a last assistant message.
        if isinstance(messages[index], AIMessage) and index < len(messages) - 1:
            return None
        if not isinstance(messages[index], (AIMessage, SystemMessage, ToolMessage, FunctionMessage)):
            return index
    return None


def _convert(message: BaseMessage, name: str, *, strict: bool) -> list[dict[str, Any]]:
    """Convert one message, to several if its content holds tool results; `strict`: its content must be text."""
    role = _role(message, name)
    if isinstance(message, AIMessage):
        return [_convert_reply(message)]
    results, content = _split_tool_results(message.content) if role == "user" else ([], message.content)
    fields: dict[str, Any] = {"role": role, "content": _text(content, "\n", name if strict else None)}
    if message.name:
        fields["name"] = message.name
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, FunctionMessage):
        fields["tool_call_id"] = f"function_{message.name}"
    return [*results, *([] if results and not fields["content"] else [fields])]


def _role(message: BaseMessage, name: str) -> str:
    if isinstance(message, (ToolMessage, FunctionMessage)):
        return "tool"
    kind = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk")
    if (role := _ROLES.get(kind.lower())) is not None:
        return role
    label = f"the role {message.role!r}" if isinstance(message, ChatMessage) else f"the type {type(message).__name__}"
    raise ConfigurationError(f"{name} has {label}; the model knows system, user, assistant and tool messages")


def _convert_reply(message: AIMessage) -> dict[str, Any]:
    calls, invalid = _calls_of(message)
    content = message.content
    if not isinstance(content, str):
        content = [block for block in content if _block_type(block) not in _CALL_BLOCKS | _REPEATED_BLOCKS]
    texts = [_text(content, ""), str(message.additional_kwargs.get("refusal") or ""), *map(_call_text, invalid)]
    fields: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, texts))}
    if message.name:
        fields["name"] = message.name
    if calls:
        fields["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in calls
        ]
    if thinking := thinking_of(message):
        fields["reasoning_content"] = thinking
    reason = message.response_metadata.get("finish_reason", message.response_metadata.get("stop_reason"))
    if isinstance(reason, str) and reason in _END_REASONS:
        fields[FINISHED] = True
    return fields


def _calls_of(message: AIMessage) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    found = [_parse_call(call["name"], call["args"], call["id"]) for call in message.tool_calls]
    found += message.invalid_tool_calls
    known = {call["id"] for call in found}
    for block in message.content:
        # Most replies repeat their calls as content blocks.
        if not isinstance(block, dict) or _block_type(block) not in _CALL_BLOCKS:
            continue
        identifiers = (block.get("id"), block.get("call_id"))
        if known.isdisjoint(each if isinstance(each, str) else None for each in identifiers):
            arguments = next((block[key] for key in ("input", "args", "arguments") if key in block), None)
            found.append(_parse_call(block.get("name"), arguments, block.get("call_id") or block.get("id")))
    legacy = message.additional_kwargs.get("function_call")
    if isinstance(legacy, Mapping) and not found:
        # OpenAI's legacy format, which has no call ids.
        found.append(_parse_call(legacy.get("name"), legacy.get("arguments"), f"function_{legacy.get('name')}"))
    return _split_by_validity(found)


def _split_by_validity(calls: Sequence[ToolCall | InvalidToolCall]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    valid = [call for call in calls if call["type"] == "tool_call"]
    return valid, [call for call in calls if call["type"] == "invalid_tool_call"]


def _call_text(call: InvalidToolCall) -> str:
    name, arguments = call.get("name") or "", (call.get("args") or "").removeprefix(UNREADABLE)
    if not name or json.dumps(name) in arguments:
        return arguments
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'


def _block_type(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else None


def _parse_call(name: Any, arguments: Any, identifier: Any) -> ToolCall | InvalidToolCall:
    """Return a valid call if it has a name and its arguments are an encodable mapping, else an invalid call."""
    identifier = None if identifier is None else str(identifier)
    reason = "the call has no name"
    if isinstance(name, str) and name:
        try:
            parsed = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
            if not isinstance(parsed, Mapping):
                raise TypeError("the arguments are not a JSON object")
            check_encodable(parsed, "arguments")
            return tool_call(name=name, args=dict(parsed), id=identifier)
        except (ValueError, TypeError, RecursionError, ConfigurationError) as error:
            reason = str(error)
    text = arguments if isinstance(arguments, str) else "" if arguments is None else json.dumps(arguments, default=str)
    name = name if isinstance(name, str) else None
    return invalid_tool_call(name=name, args=text, id=identifier, error=reason)


def from_openai(fields: Mapping[str, Any]) -> BaseMessage:
    """Convert a message in OpenAI's format, with the thinking and the calls of earlier replies."""
    # Clients send invalid calls back as they received them: these become `invalid_tool_calls` again.
    rest = {**fields, "content": fields.get("content") or ""}
    is_reply = rest.get("role") in ("assistant", "ai")
    raw_calls = (rest.pop("tool_calls", None) or []) if is_reply else []
    if not isinstance(raw_calls, list):
        raise ConfigurationError("a message cannot be read: its tool_calls are not a list")
    thinking = (rest.pop(THINKING_KEY, None) or rest.pop("reasoning", None)) if is_reply else None
    try:
        (message,) = convert_to_messages([rest])
    except (ValueError, NotImplementedError, TypeError, KeyError) as error:
        raise ConfigurationError(f"a message cannot be read: {' '.join(str(error).split())[:300]}") from error
    if isinstance(message, AIMessage):
        calls, invalid = _split_by_validity([_call_from_openai(call) for call in raw_calls])
        message.tool_calls += calls
        message.invalid_tool_calls += invalid
        if isinstance(thinking, str):
            message.additional_kwargs[THINKING_KEY] = thinking
    return message


def _call_from_openai(call: Any) -> ToolCall | InvalidToolCall:
    """Convert a call in OpenAI's or in LangChain's format."""
    fields = call if isinstance(call, Mapping) else {}
    function = fields.get("function")
    if not isinstance(function, Mapping):
        function = fields
    name, arguments = function.get("name"), function.get("arguments", function.get("args"))
    if name and (arguments is None or (isinstance(arguments, str) and not arguments.strip())):
        arguments = {}  # many servers and clients write no arguments as an empty text
    return _parse_call(name, arguments, fields.get("id"))


def conversation(messages: Sequence[BaseMessage], *, may_be_empty: bool = False) -> list[dict[str, Any]]:
    """Convert the messages of a prompt; an unfinished last assistant message is the beginning of the reply.

    Raises ConfigurationError if there is no question, unless the prompt `may_be_empty`.
    """
    # A finished reply is not continued: in a graph of several agents, another agent may have written it.
    converted = template_messages(messages)
    if not may_be_empty:
        _check_question(messages)
    if isinstance(last := messages[-1], AIMessage):
        if any(_calls_of(last)):
            raise ConfigurationError("the last message calls tools: append a message with the result of each call")
        if continues(converted) and not converted[-1]["content"] and thinking_of(last):
            raise ConfigurationError("the last message is all thinking, which no template continues: leave it out")
    return without_empty_replies(converted)


def _check_question(messages: Sequence[BaseMessage]) -> None:
    """Raise ConfigurationError if the question is empty; a history whose question was removed may have none."""
    index = _question_index(messages)
    if index is None:
        is_empty = not any(isinstance(message, AIMessage) for message in messages)
    else:
        results, content = _split_tool_results(messages[index].content)
        is_empty = not results and not _is_visible(_text(content, ""))
    if is_empty:
        raise ConfigurationError(_NO_QUESTION)


def _is_visible(text: str) -> bool:
    """Whether a text has a character that shows: neither white space, nor such as U+200B and U+FEFF."""
    return any(unicodedata.category(character) not in _INVISIBLE for character in text)


def without_empty_replies(converted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop empty assistant messages at the end, since they begin no reply; ConfigurationError if none remains."""
    kept = list(converted)
    while kept and kept[-1]["role"] == "assistant" and not kept[-1]["content"] and not kept[-1].get("tool_calls"):
        kept.pop()
    if not kept:
        raise ConfigurationError(_NO_QUESTION)
    return kept


def thinking_of(message: AIMessage) -> str:
    """Return the thinking of a reply."""
    blocks = [block for block in message.content if isinstance(block, dict)]
    # Anthropic's models write blocks of type "thinking".
    from_blocks = "".join(str(block.get(kind, "")) for kind in ("reasoning", "thinking") for block in blocks)
    return from_blocks or str(message.additional_kwargs.get(THINKING_KEY) or "")


def _split_tool_results(content: Any) -> tuple[list[dict[str, Any]], Any]:
    """Split a user's content into tool results, as Anthropic's API has them, and the rest."""
    if isinstance(content, str):
        return [], content
    results: list[dict[str, Any]] = []
    for block in content:
        if _block_type(block) == "tool_result":
            text = _text(block.get("content") or "", "\n")
            results.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id") or "")})
    return results, [block for block in content if _block_type(block) != "tool_result"]


def _text(content: Any, separator: str, name: str | None = None) -> str:
    """Return the text of a content or of its blocks, with a note in place of a block that is not text.

    With the `name` of a message, such a block raises ConfigurationError.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    kinds: set[str] = set()
    for block in content if isinstance(content, list) else [content]:
        text = _block_text(block, separator)
        if text is None:
            kinds.add(str(block.get("type", "?")) if isinstance(block, dict) else type(block).__name__)
            text = _note(block)
        texts.append(text)
    if kinds and name is not None:
        raise ConfigurationError(
            f"this model reads only text; {name} has content of the type {', '.join(sorted(kinds))}"
        )
    return separator.join(texts)


def _block_text(block: Any, separator: str) -> str | None:
    """Return the text of a block of a content; None: it is not text."""
    match block:
        case (
            (str() as text)
            | {"type": "text" | "input_text" | "output_text" | "text-plain", "text": str() as text}
            | {"type": "refusal", "refusal": str() as text}
        ):
            return text
        case {"text": str() as text, **rest} if "type" not in rest:
            return text
        case {"json": value, **rest} if rest.get("type", "json") == "json":
            return json.dumps(value, default=str, ensure_ascii=False)
        case bool() | int() | float():
            return json.dumps(block)
        case {"type": "json", **fields}:
            return json.dumps(fields, default=str, ensure_ascii=False)
        case {"type": "search_result" | "document", "content": [*inner]}:
            heading = [block["title"]] if isinstance(block.get("title"), str) else []
            return _text([*heading, *inner], separator)
        case dict() if "type" not in block:
            return json.dumps(block, default=str, ensure_ascii=False)
    return None


def _note(block: Any) -> str:
    """Return a text for the model in place of a block that it cannot read."""
    kind = _block_type(block) or "unknown"
    source = block.get("source") if isinstance(block, dict) else None
    fields = {**(source if isinstance(source, dict) else {}), **(block if isinstance(block, dict) else {})}
    described = [fields.get(key) for key in ("mime_type", "media_type", "filename", "name", "title")]
    details = ", ".join(text[:_MAX_DETAIL] for text in described if isinstance(text, str) and text)
    return f"[{kind}{f' ({details})' if details else ''} left out: this model reads only text]"
