"""LangChain messages to what chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.messages.utils import convert_to_messages

from lookahead_agent.errors import ConfigurationError


def template_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's format, with text content and tool-call arguments as mappings.

    Raises:
        ConfigurationError: No message at all, or content that is not text.
    """
    if not messages:
        raise ConfigurationError("there is no message to reply to")
    converted = convert_to_openai_messages(list(convert_to_messages(messages)), text_format="string")
    assert isinstance(converted, list)
    for message in converted:
        message["content"] = _text(message.get("content"))
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return converted


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
