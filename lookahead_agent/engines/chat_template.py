"""Messages as chat templates take them, the tags of thinking, and checks of what templates are given."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead_agent.errors import ConfigurationError

Message = Mapping[str, Any]  # in OpenAI's format, the arguments of its tool calls as mappings
FINISHED = "finished"  # field of an assistant's message that its model has ended; no template reads it
_LONGEST_ARGUMENTS = 1 << 16  # characters of template arguments in JSON


@dataclass(frozen=True)
class ThinkingTags:
    """How a model marks its thinking."""

    open: str = "<think>"  # tag that begins the thinking; some chat templates write it, so that the reply begins inside
    close: str = "</think>"  # tag that ends it
    # Whether the model thinks before each answer unless the prompt says otherwise: text before a closing tag that
    # nothing opened is thinking then.
    always: bool = True

    def opened_by(self, prompt: str) -> bool:
        """Whether a reply to this prompt begins inside the thinking."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Whether a reply to this prompt begins after the thinking."""
        return prompt.rstrip().endswith(self.close)


def continues(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the reply: the assistant's own, which no model has finished."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get(FINISHED)


def ending(messages: Sequence[Message]) -> dict[str, bool]:
    """How a prompt ends: with the beginning of a reply, or open, where the last message is one."""
    if not continues(messages):
        return {"add_generation_prompt": True}
    return {"add_generation_prompt": False, "continue_final_message": not messages[-1].get("tool_calls")}


def tool_calls(message: Message) -> Sequence[Message]:
    """The calls in a message."""
    return message.get("tool_calls") or ()


MARK = re.compile(r"mark\d+(?:content|name|call\d+)x")  # a text of `marked`


def marked(message: Message, place: int) -> dict[str, Any]:
    """A message with a mark in the place of each text."""
    marked = dict(message)
    for field in ("content", "name"):
        if message.get(field):
            marked[field] = f"mark{place}{field}x"
    if tool_calls(message):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"mark": f"mark{place}call{number}x"}}}
            for number, call in enumerate(tool_calls(message))
        ]
    return marked


def without_lone_results(messages: Sequence[Message]) -> list[Message]:
    """Messages in which the results of tools that no message calls are the user's."""
    called = {call.get("id") for message in messages for call in tool_calls(message)}
    return [
        {"role": "user", "content": message.get("content")}
        if message["role"] == "tool" and message.get("tool_call_id") not in called
        else message
        for message in messages
    ]


def with_argument_texts(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have their arguments as JSON text."""

    def with_text(call: Message) -> Message:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        {**message, "tool_calls": [*map(with_text, tool_calls(message))]} if tool_calls(message) else message
        for message in messages
    ]


def check_arguments(arguments: Mapping[str, Any], variables: frozenset[str]) -> None:
    """Raise ConfigurationError if a template reads no such variable, or a value is too long or not of JSON's types."""
    if unknown := sorted(str(name)[:80] for name in arguments.keys() - variables):
        readable = ", ".join(sorted(variables)) or "none"
        raise ConfigurationError(
            f"the model's chat template reads no {', '.join(unknown[:5])}; a call may set what it does read: {readable}"
        )
    try:
        length = len(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the arguments of the chat template are no JSON: {error}") from None
    if length > _LONGEST_ARGUMENTS:
        raise ConfigurationError(
            f"the arguments of the chat template have {length} characters; at most {_LONGEST_ARGUMENTS} are taken"
        )
