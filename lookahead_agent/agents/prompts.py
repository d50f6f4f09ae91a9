"""Texts for models from tools and messages, and the labels of model calls."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from inspect import cleandoc
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

Message = TypeVar("Message", bound=BaseMessage)

REPEATED = "repeated"
"""Key in `additional_kwargs` of a `ToolMessage` whose call was skipped as a repetition."""


def describe_tools(tools: Iterable[BaseTool | Mapping[str, Any]]) -> str:
    """Describe each tool by name, arguments and description, on one or more lines: `- name(argument: type): …`."""
    return "\n".join(f"- {_described(convert_to_openai_tool(tool)['function'])}" for tool in tools)


def _described(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters", {})
    required = parameters.get("required", ())
    arguments = [
        f"{name}: {_kind(schema)}" + ("" if name in required else f" = {json.dumps(schema.get('default'))}")
        for name, schema in parameters.get("properties", {}).items()
    ]
    lines = cleandoc(function.get("description", "")).splitlines()
    description = "\n  ".join(line for line in lines if line.strip())
    return f"{function['name']}({', '.join(arguments)}): {description}"


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_kind(part) for part in schema["anyOf"])
    if schema.get("type") == "array" and isinstance(schema.get("items"), Mapping):
        return f"list of {_kind(schema['items'])}"
    return str(schema.get("type", "any"))


def since_last_question(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages from the last question on; all of them if there is no question."""
    return messages[max((at for at, message in enumerate(messages) if isinstance(message, HumanMessage)), default=0) :]


def result_blocks(messages: Iterable[AnyMessage]) -> str:
    """Format calls and results as blocks, `[1] name(argument="…")` and the text; "none" without results."""
    calls: dict[str | None, str] = {}
    blocks: list[str] = []
    for message in messages:
        if isinstance(message, AIMessage):
            calls |= {call["id"]: format_call(call["name"], call["args"]) for call in message.tool_calls}
        elif isinstance(message, ToolMessage) and REPEATED not in message.additional_kwargs:
            failed = " failed" if message.status == "error" else ""
            called = calls.get(message.tool_call_id, message.name or "a call")
            blocks.append(f"[{len(blocks) + 1}] {called}{failed}\n{message.text.strip() or '(nothing)'}")
    return "\n\n".join(blocks) or "none"


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Format a call for a reader: `name(argument="value", other=1)`."""
    listed = ", ".join(
        f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in arguments.items()
    )
    return f"{name}({listed})"


def conversation_with_results(messages: Sequence[AnyMessage], heading: str, then: str = "") -> list[AnyMessage]:
    """Return the conversation without calls: earlier questions and answers, and the last question with its results.

    `heading` precedes the results, which follow the question as blocks, and `then` follows them.
    """
    now = since_last_question(messages)
    before = [message for message in messages[: len(messages) - len(now)] if _is_text(message)]
    question = now[0].text if now and isinstance(now[0], HumanMessage) else ""
    parts = [question, f"{heading}:\n\n{result_blocks(now)}", then]
    return [*before, HumanMessage("\n\n".join(filter(None, parts)))]


def _is_text(message: AnyMessage) -> bool:
    called = isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls)
    return not isinstance(message, ToolMessage) and not called and bool(message.text.strip())


def lookahead_settings(model: object, *, node: str, action_markers: Sequence[str] = ()) -> dict[str, Any]:
    """Return settings of one `ChatLookahead` call, for `ModelRequest.model_settings` or `bind`; none for other models.

    Args:
        model: The chat model that is called.
        node: Label of the call, which `policies` and the reply's metadata use.
        action_markers: Texts after which a reply is action: no draft step is accepted there.
    """
    if _as_lookahead(model) is None:
        return {}
    return {"node": node, **({"action_markers": tuple(action_markers)} if action_markers else {})}


def warm(model: object, messages: Sequence[BaseMessage], *, node: str) -> None:
    """Have a `ChatLookahead` prefill the beginning of a node's next prompts, by its `warm`; other models do nothing.

    Args:
        model: The chat model that will be called.
        messages: Beginning of the prompts. A human message follows.
        node: Label of the calls.
    """
    if (found := _as_lookahead(model)) is not None:
        found.warm([*messages, HumanMessage("")], node=node)


def _as_lookahead(model: object) -> Any:
    """Return the `ChatLookahead` behind a model with bound arguments; None if it is another model."""
    # Importing the chat model takes seconds, and none exists before its module is loaded.
    module = sys.modules.get("lookahead_agent.chat.model")
    while (inner := getattr(model, "bound", None)) is not None:
        model = inner
    return model if module is not None and isinstance(model, module.ChatLookahead) else None
