"""Texts for models, made of tools and messages, and the names of their calls."""

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
"""Key of `additional_kwargs` of a `ToolMessage` whose call was not made, since the one before was the same."""


def describe_tools(tools: Iterable[BaseTool | Mapping[str, Any]]) -> str:
    """Each tool's name, arguments and description, one line or more for each: `- name(argument: type): …`."""
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


def this_question(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages from the last question on; all of them if nobody asked."""
    return messages[max((at for at, message in enumerate(messages) if isinstance(message, HumanMessage)), default=0) :]


def result_blocks(messages: Iterable[AnyMessage]) -> str:
    """The messages' calls and results as blocks, `[1] name(argument="…")` and the text; "none" without results."""
    calls: dict[str | None, str] = {}
    blocks: list[str] = []
    for message in messages:
        if isinstance(message, AIMessage):
            calls |= {call["id"]: call_text(call["name"], call["args"]) for call in message.tool_calls}
        elif isinstance(message, ToolMessage) and REPEATED not in message.additional_kwargs:
            failed = " failed" if message.status == "error" else ""
            called = calls.get(message.tool_call_id, message.name or "a call")
            blocks.append(f"[{len(blocks) + 1}] {called}{failed}\n{message.text.strip() or '(nothing)'}")
    return "\n\n".join(blocks) or "none"


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as one reads it: `name(argument="value", other=1)`."""
    listed = ", ".join(
        f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in arguments.items()
    )
    return f"{name}({listed})"


def conversation_with_results(messages: Sequence[AnyMessage], heading: str, then: str = "") -> list[AnyMessage]:
    """The conversation without calls: what was asked and answered before, and the last question with its results.

    `heading` precedes the results, which follow the question as blocks, and `then` follows them.
    """
    now = this_question(messages)
    before = [message for message in messages[: len(messages) - len(now)] if _is_said(message)]
    asked = now[0].text if now and isinstance(now[0], HumanMessage) else ""
    parts = [asked, f"{heading}:\n\n{result_blocks(now)}", then]
    return [*before, HumanMessage("\n\n".join(filter(None, parts)))]


def _is_said(message: AnyMessage) -> bool:
    called = isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls)
    return not isinstance(message, ToolMessage) and not called and bool(message.text.strip())


def lookahead_settings(model: object, *, node: str, action_markers: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of one call of a `ChatLookahead`, for `ModelRequest.model_settings` or `bind`; none for other models.

    Args:
        model: The chat model that is called.
        node: Name of the call, by which `policies` and the reply's metadata go.
        action_markers: Texts after which a reply is action; no draft step is accepted behind them.
    """
    if _as_lookahead(model) is None:
        return {}
    return {"node": node, **({"action_markers": tuple(action_markers)} if action_markers else {})}


def warm(model: object, messages: Sequence[BaseMessage], *, node: str) -> None:
    """Have a `ChatLookahead` read how a node's next prompts begin, as its `warm` does; nothing for other models.

    Args:
        model: The chat model that will be called.
        messages: With which the prompts begin. A person's next message follows.
        node: Name of the calls.
    """
    if (found := _as_lookahead(model)) is not None:
        found.warm([*messages, HumanMessage("")], node=node)


def _as_lookahead(model: object) -> Any:
    """The `ChatLookahead` behind a model with bound arguments; None if it is another."""
    # Such a model exists only where its module is loaded, which takes seconds.
    module = sys.modules.get("lookahead_agent.chat.model")
    while (inner := getattr(model, "bound", None)) is not None:
        model = inner
    return model if module is not None and isinstance(model, module.ChatLookahead) else None
