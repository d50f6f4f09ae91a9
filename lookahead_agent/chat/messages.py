"""LangChain messages to what chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.messages.utils import convert_to_messages

from lookahead_agent.errors import ConfigurationError

THINKING_KEY = "reasoning_content"
"""Where LangChain keeps a reply's thinking: a message's `content_blocks` show it as a block of type "reasoning"."""


def template_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's format, with text content and tool-call arguments as mappings.

    The thinking of earlier replies goes into `reasoning_content`, which a template uses or leaves out as it likes.

    Raises:
        ConfigurationError: No message at all, or content that is not text.
    """
    if not messages:
        raise ConfigurationError("there is no message to reply to")
    given = list(convert_to_messages(messages))
    converted = convert_to_openai_messages([_said_aloud(message) for message in given], text_format="string")
    assert isinstance(converted, list)
    # A message whose content holds tool results may become several.
    if len(converted) == len(given):
        for original, message in zip(given, converted, strict=True):
            if thinking := thinking_of(original):
                message["reasoning_content"] = thinking
    for message in converted:
        message["content"] = _text(message.get("content"))
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return converted


def thinking_of(message: BaseMessage) -> str:
    """The thinking of a reply."""
    if not isinstance(message, AIMessage):
        return ""
    blocks = [block for block in message.content if isinstance(block, dict)]
    # "thinking" is what replies of Anthropic's models have.
    stated = "".join(str(block.get(kind, "")) for kind in ("reasoning", "thinking") for block in blocks)
    return stated or str(message.additional_kwargs.get(THINKING_KEY) or "")


# Content blocks of replies that messages also have in other places.
_ELSEWHERE = frozenset(
    {"reasoning", "thinking", "redacted_thinking", "tool_call", "tool_call_chunk", "invalid_tool_call"}
)


def _said_aloud(message: BaseMessage) -> BaseMessage:
    """A reply without the blocks of its content that are no text."""
    if not isinstance(message, AIMessage) or isinstance(message.content, str):
        return message
    blocks = [block for block in message.content if not (isinstance(block, dict) and block.get("type") in _ELSEWHERE)]
    return message.model_copy(update={"content": blocks})


def question(messages: Sequence[BaseMessage]) -> str:
    """The last thing that somebody else than the model said."""
    for message in reversed(messages):
        if not isinstance(message, AIMessage):
            return message.text
    return ""


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    kinds = sorted({block.get("type", "?") for block in content if block.get("type") != "text"})
    if kinds:
        raise ConfigurationError(f"this model reads only text; a message has content of type {', '.join(kinds)}")
    return "".join(block["text"] for block in content)
