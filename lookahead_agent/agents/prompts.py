"""Texts for models from tools and messages, and the labels of model calls."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import cleandoc
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ChatMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_schemas import describe_function, with_all_fields
from lookahead_agent.errors import ConfigurationError

MessageT = TypeVar("MessageT", bound=BaseMessage)

REPEATED = "repeated"
"""Key in `additional_kwargs` of a `ToolMessage` whose call was skipped as a repetition."""

PLAN_NODES = ("planner", "executor")
"""Names of the model's messages in a plan, beside the answer."""

TOOL_HEADING = "\n\nThe tool is:\n"
"""Ends a tool's own words about a failure; the explanation of `ToolResultMiddleware` follows."""

OF_RUN = "question_of_run"
"""Key in `additional_kwargs` of the question that a run is about, in the messages of a model's turn."""


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


def is_question(message: BaseMessage) -> bool:
    """Whether a person's message is a question; the summary of earlier messages by a middleware is none."""
    is_human = isinstance(message, HumanMessage) or (
        isinstance(message, ChatMessage) and message.role.lower() in ("user", "human")
    )
    return is_human and message.additional_kwargs.get("lc_source") != "summarization"


def since_last_question(messages: Sequence[MessageT]) -> Sequence[MessageT]:
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


def result_blocks(messages: Iterable[AnyMessage], *, explained: bool = False) -> str:
    """Format calls and results as blocks, `[1] name(argument="value")` and the text, each once; "none" without any.

    Calls that failed with the same words of their tool share a block. With `explained`, the tool's arguments follow
    the last result if that call failed.
    """
    calls: dict[str | None, str] = {}
    blocks: dict[tuple[str, str], list[str]] = {}  # headings by call and text, or by the words about a failure
    explanation = ""
    for message in messages:
        if isinstance(message, AIMessage):
            calls |= {call["id"]: format_call(call["name"], call["args"]) for call in message.tool_calls}
        elif isinstance(message, ToolMessage) and REPEATED not in message.additional_kwargs:
            called, failed = calls.get(message.tool_call_id, message.name or "a call"), message.status == "error"
            text, explanation = own_words(message.text) if failed else (message.text, "")
            key = ("" if failed else called, text.strip() or "(nothing)")
            headings = blocks.pop(key, [])
            blocks[key] = list(dict.fromkeys([*headings, f"{called} failed" if failed else called]))
    listed = [
        "\n".join([f"[{number}] {heading}", *more, text])
        for number, ((_, text), (heading, *more)) in enumerate(blocks.items(), 1)
    ]
    return "\n\n".join(listed) + (explanation if explained else "") or "none"


def own_words(error: str) -> tuple[str, str]:
    """Split the text of a failed call into the tool's own words and the explanation after `TOOL_HEADING`."""
    words, heading, explanation = error.partition(TOOL_HEADING)
    return words, heading + explanation


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Format a call for a reader: `name(argument="value", other=1)`."""
    listed = ", ".join(
        f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in arguments.items()
    )
    return f"{name}({listed})"


def conversation_with_results(
    messages: Sequence[AnyMessage], heading: str, then: str = "", *, explained: bool = False
) -> list[AnyMessage]:
    """Return the conversation without calls: earlier questions and answers, and the last question with its results.

    `heading` precedes the results, which follow the question as blocks, and `then` follows them; `explained` is as in
    `result_blocks`.
    """
    now = since_last_question(messages)
    question = [message.text for message in now if is_question(message)]
    parts = [*question, f"{heading}:\n\n{result_blocks(now, explained=explained)}", then]
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


_MAX_TOKENS, _MAX_THINKING_TOKENS = 1024, 8192
"""Tokens of a template's reply by a model without a limit of its own, and by one that thinks, or may think."""


def reply_limit(model: object) -> dict[str, int]:
    """Return the `max_tokens` of a template's calls; nothing for other models, and for one that has its own limit.

    A small model may repeat itself until the context is full.
    """
    while (inner := getattr(model, "bound", None)) is not None:
        if "max_tokens" in getattr(model, "kwargs", {}):
            return {}
        model = inner
    if (found := _as_lookahead(model)) is None or found.max_tokens is not None:
        return {}
    thinks = (found.profile or {}).get("reasoning_output") is not False
    return {"max_tokens": _MAX_THINKING_TOKENS if thinks else _MAX_TOKENS}


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
    while (inner := getattr(model, "bound", None)) is not None:
        model = inner
    # LangChain's type tells it, since importing the chat model takes seconds.
    return model if getattr(model, "_llm_type", None) == "lookahead" else None
