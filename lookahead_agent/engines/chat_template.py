"""Messages in the form that chat templates take, thinking tags, and checks of template arguments."""

import ctypes
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lookahead_agent.errors import ConfigurationError

Message = Mapping[str, Any]  # in OpenAI's format, but with the arguments of tool calls as mappings
FINISHED = "finished"  # field that marks an assistant message as complete; no template reads it
_MAX_FACTOR_DIGITS = 5
_MAX_ARGUMENTS_LENGTH = 1 << 16  # characters of the template arguments as JSON


@dataclass(frozen=True)
class ThinkingTags:
    """The tags around a model's thinking."""

    open: str = "<think>"  # opening tag; some chat templates write it, so that the reply begins inside
    close: str = "</think>"  # closing tag
    # Whether the model thinks before each answer unless the prompt says otherwise: text before a closing tag without
    # an opening tag is then thinking.
    always: bool = True

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt opens the thinking, so that the reply begins inside it."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt closes the thinking, so that the reply begins after it."""
        return prompt.rstrip().endswith(self.close)


def continues(messages: Sequence[Message]) -> bool:
    """Whether the reply continues the last message: an assistant message that is not marked `FINISHED`."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get(FINISHED)


def ending(messages: Sequence[Message]) -> dict[str, bool]:
    """Return the template options for the end of the prompt: start a reply, or leave the last message open."""
    if not continues(messages):
        return {"add_generation_prompt": True}
    return {"add_generation_prompt": False, "continue_final_message": not messages[-1].get("tool_calls")}


def tool_calls(message: Message) -> Sequence[Message]:
    """The tool calls of a message."""
    return message.get("tool_calls") or ()


MARK = re.compile(r"mark\d+(?:content|name|call\d+)x")  # a marker that `marked` writes


def marked(message: Message, index: int) -> dict[str, Any]:
    """Replace each text of a message, and the arguments of each tool call, by a unique marker."""
    marked = dict(message)
    for field in ("content", "name"):
        if message.get(field):
            marked[field] = f"mark{index}{field}x"
    if tool_calls(message):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"mark": f"mark{index}call{call_index}x"}}}
            for call_index, call in enumerate(tool_calls(message))
        ]
    return marked


def without_lone_results(messages: Sequence[Message]) -> list[Message]:
    """Turn the results of tools that no message calls into user messages."""
    call_ids = {call.get("id") for message in messages for call in tool_calls(message)}
    return [
        {"role": "user", "content": message.get("content")}
        if message["role"] == "tool" and message.get("tool_call_id") not in call_ids
        else message
        for message in messages
    ]


def with_argument_texts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of tool calls as JSON text."""

    def with_text(call: Message) -> Message:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        {**message, "tool_calls": [*map(with_text, tool_calls(message))]} if tool_calls(message) else message
        for message in messages
    ]


class TemplateTimeoutError(ConfigurationError):
    """A chat template runs for too long."""


def check_template(text: str) -> None:
    """Raise ConfigurationError for an operation that may never end, and that no time-out can interrupt.

    Jinja computes powers and products of constants when it compiles a template.
    """
    from jinja2 import Environment, TemplateSyntaxError

    tokens: list[tuple[int, str, str]] = []
    with suppress(TemplateSyntaxError):  # its reader raises the error
        tokens = [token for token in Environment().lex(text) if token[1] != "whitespace"]
    for place, (line, kind, value) in enumerate(tokens):
        before, after = tokens[place - 1] if place else None, tokens[place + 1] if place + 1 < len(tokens) else None
        operands = [token for token in (before, after) if token is not None]
        is_power = (kind, value) == ("operator", "**") and (before is None or before[2] not in ("(", ","))
        is_product = (kind, value) == ("operator", "*") and any(
            token[1] == "integer" and len(token[2]) > _MAX_FACTOR_DIGITS for token in operands
        )
        if is_power or is_product:
            raise ConfigurationError(f"line {line} of the chat template has an operation without a bound: {value!r}")


def within(seconds: float, render: Callable[[], str]) -> str:
    """Run a template in this thread; raises TemplateTimeoutError after `seconds`."""
    thread, lock = threading.get_ident(), threading.Lock()
    has_ended = is_overdue = False

    def interrupt() -> None:
        nonlocal is_overdue
        with lock:
            if not has_ended:
                is_overdue = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_OverdueError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            return render()
        finally:
            with lock:
                has_ended = True
            timer.cancel()
            # An interrupt arrives at the next jump, at the latest here.
            for _ in range(1000 if is_overdue else 0):
                pass
    except _OverdueError:
        raise TemplateTimeoutError(
            f"the chat template ran for {seconds:g} s and was ended: it may loop without end; take another template"
        ) from None


class _OverdueError(BaseException):
    """Interrupts a template; no handler of `Exception` stops it."""


def check_arguments(arguments: Mapping[str, Any], variables: frozenset[str]) -> None:
    """Raise ConfigurationError if the template reads no such variable, or the values are too long or not JSON."""
    if unknown := sorted(str(name)[:80] for name in arguments.keys() - variables):
        readable = ", ".join(sorted(variables)) or "none"
        raise ConfigurationError(
            f"the model's chat template reads no {', '.join(unknown[:5])}; a call may set what it does read: {readable}"
        )
    try:
        length = len(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the arguments of the chat template are no JSON: {error}") from None
    if length > _MAX_ARGUMENTS_LENGTH:
        raise ConfigurationError(
            f"the arguments of the chat template have {length} characters; at most {_MAX_ARGUMENTS_LENGTH} are taken"
        )
