"""The replies to one request, in the two forms of OpenAI's API: of a chat, and of a text without a chat template."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from lookahead_agent.decoding import StepEvent
from lookahead_agent.generation.backend import ChatReply, GenerateEvent, TextDelta, event_to_json
from lookahead_agent.generation.tool_calls import as_invalid_json
from lookahead_agent.server.protocol import (
    ChatChoice,
    ChatReplyBody,
    CompletionReplyBody,
    CompletionTokens,
    FunctionCall,
    LookaheadFigures,
    PromptTokens,
    ReplyMessage,
    TextChoice,
    ToolCall,
    Usage,
)
from lookahead_agent.server.responses import merge


class Replies:
    """The replies to one request, whole or in chunks.

    Args:
        streams: Generate them, the choices of each prompt in a row.
        choices: Of each prompt.
        model: The model's name.
        chat: Whether they have the form of `/v1/chat/completions`; else that of `/v1/completions`.
        with_usage: Whether a last chunk tells the tokens.
        with_events: Whether chunks tell steps, and the last one the whole reply, in their field `lookahead`.
    """

    def __init__(
        self,
        streams: Sequence[AsyncGenerator[GenerateEvent, None]],
        choices: int,
        model: str,
        *,
        chat: bool,
        with_usage: bool = False,
        with_events: bool = False,
    ) -> None:
        self._streams = streams
        self._choices = choices
        self._chat = chat
        self._with_usage = with_usage
        self._with_events = with_events
        prefix = "chatcmpl" if chat else "cmpl"
        self._base = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._done: dict[int, ChatReply] = {}
        self._started: set[int] = set()

    async def body(self) -> dict[str, Any]:
        """All replies in one."""
        async with aclosing(merge(self._streams)) as events:
            async for index, event in events:
                if isinstance(event, ChatReply):
                    self._done[index] = event
        replies = sorted(self._done.items())
        rest = {**self._base, "usage": self._usage(), "lookahead": [_figures(reply) for _, reply in replies]}
        if self._chat:
            chats = [
                ChatChoice(index=index, message=_message(reply), finish_reason=_finish_reason(reply))
                for index, reply in replies
            ]
            return ChatReplyBody(choices=chats, **rest).model_dump()
        texts = [
            TextChoice(index=index, text=reply.content, finish_reason=reply.finish_reason) for index, reply in replies
        ]
        return CompletionReplyBody(choices=texts, **rest).model_dump()

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The data of a stream's events."""
        base = self._base | {"object": "chat.completion.chunk" if self._chat else "text_completion"}
        base |= {"usage": None} if self._with_usage else {}
        async with aclosing(merge(self._streams)) as events:
            async for index, event in events:
                if isinstance(event, StepEvent):
                    if self._with_events:
                        yield base | {"choices": [], "lookahead": event_to_json(event)}
                    continue
                parts = list(self._chat_parts(index, event) if self._chat else _text_parts(event))
                chunks = [base | {"choices": [{"index": index, "logprobs": None} | part]} for part in parts]
                if isinstance(event, ChatReply):
                    self._done[index] = event
                    told = event_to_json(event) if self._with_events else _figures(event).model_dump()
                    chunks[-1]["lookahead"] = told
                for chunk in chunks:
                    yield chunk
        if self._with_usage:
            yield base | {"choices": [], "usage": self._usage().model_dump()}

    def _chat_parts(self, index: int, event: TextDelta | ChatReply) -> Iterator[dict[str, Any]]:
        role = {} if index in self._started else {"role": "assistant"}
        self._started.add(index)
        if isinstance(event, TextDelta):
            kind = "reasoning_content" if event.kind == "thinking" else "content"
            yield {"delta": role | {kind: event.text}, "finish_reason": None}
            return
        calls = {"tool_calls": [call.model_dump() for call in _calls(event)]} if _calls(event) else {}
        if calls and not event.invalid_tool_calls:
            yield {"delta": role | calls, "finish_reason": None}
            role, calls = {}, {}
        elif calls and role:  # OpenAI's client takes the first chunk as it is
            yield {"delta": role | {"content": ""}, "finish_reason": None}
            role = {}
        # Clients that read arguments while they stream must know by then that these were cut off.
        yield {"delta": role | calls, "finish_reason": _finish_reason(event)}

    def _usage(self) -> Usage:
        """The tokens: of each prompt once."""
        first = [reply for index, reply in self._done.items() if index % self._choices == 0]
        prompt = sum(reply.prompt_tokens for reply in first)
        cached = sum(reply.lookahead["prompt_tokens"]["target"]["cached"] or 0 for reply in first)
        completion = sum(len(reply.token_ids) for reply in self._done.values())
        thinking = CompletionTokens(reasoning_tokens=sum(reply.thinking_tokens for reply in self._done.values()))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            completion_tokens_details=thinking,
            prompt_tokens_details=PromptTokens(cached_tokens=cached),
        )


def _text_parts(event: TextDelta | ChatReply) -> Iterator[dict[str, Any]]:
    if isinstance(event, TextDelta):
        yield {"text": event.text, "finish_reason": None}
    else:
        yield {"text": "", "finish_reason": event.finish_reason}


def _calls(reply: ChatReply) -> list[ToolCall]:
    """Tool calls, also those that cannot be read: clients report these themselves, and must not complete them."""
    read = [(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in reply.tool_calls]
    unread = [
        (call["id"], call["name"] or "", as_invalid_json(call["args"] or "")) for call in reply.invalid_tool_calls
    ]
    return [
        ToolCall(id=identifier or "", function=FunctionCall(name=name, arguments=arguments), index=index)
        for index, (identifier, name, arguments) in enumerate(read + unread)
    ]


def _finish_reason(reply: ChatReply) -> str:
    """As of the reply; but "tool_calls" also where all calls are invalid, since clients are told of them as calls."""
    return "tool_calls" if reply.finish_reason == "stop" and _calls(reply) else reply.finish_reason


def _message(reply: ChatReply) -> ReplyMessage:
    calls = _calls(reply)
    content = reply.content or (None if calls else "")
    return ReplyMessage(content=content, reasoning_content=reply.thinking or None, tool_calls=calls or None)


def _figures(reply: ChatReply) -> LookaheadFigures:
    ended = reply.lookahead["speculation_disabled"] is not None
    return LookaheadFigures.model_validate({**reply.lookahead, "speculation_disabled": ended})
