"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from starlette.requests import Request
from starlette.responses import Response

from lookahead_agent.chat.messages import from_openai, thinking_of
from lookahead_agent.engines.background import all_of
from lookahead_agent.generation.request import TextDelta
from lookahead_agent.generation.tool_calls import as_unreadable
from lookahead_agent.server.protocol import (
    ChatChoice,
    ChatReplyBody,
    ChatRequestBody,
    FunctionCall,
    NamedTool,
    ReplyMessage,
    ToolCall,
)
from lookahead_agent.server.replies import Chosen, ReplyWriter, figures_of, unless_gone, usage_of
from lookahead_agent.server.streaming import EventStream, begun, merged


async def chat_completions(
    writer: ReplyWriter, body: ChatRequestBody, request: Request, chosen: Chosen
) -> ChatReplyBody | Response:
    """Answer a request.

    Args:
        writer: Writes the replies.
        body: The request.
        request: Tells when the client goes away.
        chosen: Policy and node by header.

    Raises:
        RefusedError: It asks for what is not allowed, or too many wait.
        LookaheadError: The reply could not be written.
    """
    max_tokens = body.max_completion_tokens or body.max_tokens
    writer.check(body, max_tokens)
    messages, for_chat = await asyncio.to_thread(lambda: (_messages(body), _chat_options(body)))
    options = [writer.options(body, max_tokens, chosen, choice) | for_chat for choice in range(body.n)]
    identifier, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
    if body.stream:
        streams = [writer.stream(messages, option) for option in options]
        base = {"id": identifier, "object": "chat.completion.chunk", "created": created, "model": writer.model_name}
        events = _chunks(streams, base, body.streams_usage)
        return EventStream(await unless_gone(request, begun(events)), writer.metrics.refused)
    replies = await unless_gone(request, all_of([writer.reply(messages, option) for option in options]))
    return ChatReplyBody(
        id=identifier,
        created=created,
        model=writer.model_name,
        choices=[
            ChatChoice(index=index, message=_reply(reply), finish_reason=_finish_reason(reply))
            for index, reply in enumerate(replies)
        ],
        usage=usage_of(replies, body.n),
        lookahead=[figures_of(reply) for reply in replies],
    )


def _messages(body: ChatRequestBody) -> list[BaseMessage]:
    return [from_openai(message.model_dump(exclude_none=True)) for message in body.messages]


def _chat_options(body: ChatRequestBody) -> dict[str, Any]:
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    return {
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "template_arguments": body.chat_template_kwargs or {},
    }


def _reply(message: AIMessage) -> ReplyMessage:
    calls = _calls(message)
    return ReplyMessage(
        content=message.text or (None if calls else ""),
        reasoning_content=thinking_of(message) or None,
        tool_calls=calls or None,
    )


def _calls(message: AIMessage) -> list[ToolCall]:
    """Tool calls, also those that cannot be read: clients report these themselves, and must not complete them."""
    read = [(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls]
    unread = [
        (call["id"], call["name"] or "", as_unreadable(call["args"] or "")) for call in message.invalid_tool_calls
    ]
    return [
        ToolCall(id=identifier or "", function=FunctionCall(name=name, arguments=arguments), index=index)
        for index, (identifier, name, arguments) in enumerate(read + unread)
    ]


def _finish_reason(message: AIMessage) -> str:
    """As of the message; but "tool_calls" also where all calls are invalid, since clients are told of them as calls."""
    reason: str = message.response_metadata["finish_reason"]
    return "tool_calls" if reason == "stop" and _calls(message) else reason


async def _chunks(
    streams: list[AsyncGenerator[TextDelta | AIMessage, None]], base: dict[str, Any], wants_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    replies: list[AIMessage] = []
    started: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        if index not in started:
            started.add(index)
            delta = {"role": "assistant", **delta}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return base | {"choices": [choice]} | ({"usage": None} if wants_usage else {})

    async with aclosing(merged(streams)) as items:
        async for index, item in items:
            if isinstance(item, TextDelta):
                yield chunk(index, {"reasoning_content" if item.kind == "thinking" else "content": item.text})
                continue
            replies.append(item)
            calls = [call.model_dump() for call in _calls(item)]
            if calls and not item.invalid_tool_calls:
                yield chunk(index, {"tool_calls": calls})
                calls = []
            # Clients that read arguments as they come must know by then that these were cut off. OpenAI's takes the
            # first chunk as it is.
            if calls and index not in started:
                yield chunk(index, {"content": ""})
            finished = chunk(index, {"tool_calls": calls} if calls else {}, _finish_reason(item))
            yield finished | {"lookahead": figures_of(item).model_dump()}
    if wants_usage:
        yield base | {"choices": [], "usage": usage_of(replies, len(streams)).model_dump()}
