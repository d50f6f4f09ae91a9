"""Texts for models from tools and messages, and the labels of model calls."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from inspect import cleandoc
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ChatMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from lookahead_agent.agents.tool_schemas import check_tools
from lookahead_agent.errors import ConfigurationError

Message = TypeVar("Message", bound=BaseMessage)

REPEATED = "repeated"
"""Key in `additional_kwargs` of a `ToolMessage` whose call was skipped as a repetition."""

PLAN_NODES = ("planner", "executor")
"""Names of the model's messages in a plan, beside the answer."""

OF_RUN = "question_of_run"
"""Key in `additional_kwargs` of the question that a run is about, in the messages of a model's turn."""


def describe_tools(tools: Iterable[BaseTool | Mapping[str, Any]]) -> str:
    """Describe each tool by name, arguments and description, on one or more lines: `- name(argument: type): …`.

    Raises:
        ConfigurationError: A tool's schema is too large, or refers to something outside of it.
    """
    tools = [*tools]
    check_tools(tools)
    return "\n".join(f"- {_described(convert_to_openai_tool(tool)['function'])}" for tool in tools)


def _described(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or ()
    arguments = [
        f"{name}: {_kind(schema)}" + ("" if name in required else f" = {json.dumps(_default(schema))}")
        for name, schema in (parameters.get("properties") or {}).items()
    ]
    lines = cleandoc(function.get("description", "")).splitlines()
    description = "\n  ".join(line for line in lines if line.strip())
    return f"{function['name']}({', '.join(arguments)}): {description}"


def _default(schema: Any) -> Any:
    return schema.get("default") if isinstance(schema, Mapping) else None


def _kind(schema: Any) -> str:
    if not isinstance(schema, Mapping):  # true: any value
        return "any"
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_kind(part) for part in schema["anyOf"])
    if schema.get("type") == "array" and isinstance(schema.get("items"), Mapping):
        return f"list of {_kind(schema['items'])}"
    return str(schema.get("type", "any"))


def is_question(message: BaseMessage) -> bool:
    """Whether a person's message is a question; the summary of earlier messages by a middleware is none."""
    is_human = isinstance(message, HumanMessage) or (
        isinstance(message, ChatMessage) and message.role.lower() in ("user", "human")
    )
    return is_human and message.additional_kwargs.get("lc_source") != "summarization"


def since_last_question(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages from the last question on, or from the one that a run is about.

    Raises:
        ConfigurationError: There is no question, or it has no text.
    """
    questions = [at for at, message in enumerate(messages) if is_question(message)]
    of_run = [at for at in questions if OF_RUN in messages[at].additional_kwargs]
    if not questions or not messages[at := (of_run or questions)[-1]].text.strip():
        raise ConfigurationError(
            f"{'the question is empty' if questions else 'there is no question'}: "
            'the last human message has to have a text, as in {"messages": [("human", "What is tea?")]}'
        )
    return messages[at:]


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
    question = [message.text for message in now if is_question(message)]
    parts = [*question, f"{heading}:\n\n{result_blocks(now)}", then]
    before = conversation_before(messages[: len(messages) - len(now)])
    return [*before, HumanMessage("\n\n".join(filter(None, parts)))]


def conversation_before(messages: Sequence[AnyMessage]) -> list[AnyMessage]:
    """Return the questions and answers in messages, without calls; a result that ended a run is an answer."""
    before: list[AnyMessage] = []
    for number, message in enumerate(messages, 1):
        if isinstance(message, ToolMessage):
            if all(map(is_question, messages[number : number + 1])):
                before.append(AIMessage(message.text))
        elif not isinstance(message, AIMessage) or not (
            message.tool_calls or message.invalid_tool_calls or message.name in PLAN_NODES
        ):
            before.append(message)
    return [message for message in before if message.text.strip()]


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
