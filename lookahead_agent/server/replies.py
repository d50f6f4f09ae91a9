"""Replies in the formats of OpenAI's chat and text completions, as one JSON object or as server-sent events."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Send

from lookahead_agent.decoding import StepEvent
from lookahead_agent.generation.backend import ChatReply, GenerateEvent, TextDelta, event_to_json
from lookahead_agent.generation.server_backend import PING_SECONDS
from lookahead_agent.generation.tool_calls import calls_as_text
from lookahead_agent.server.errors import ErrorReplies
from lookahead_agent.system.background import event_stream, gather_or_cancel

T = TypeVar("T")

_THINKING_KEYS = ("reasoning_content", "reasoning")
"""Fields of a message with its thinking: DeepSeek's name, which most clients read, and vLLM's present one."""


@dataclass(eq=False)
class Replies:
    """The replies to one request, whole or in chunks; each stream generates one, `choices` of them per prompt.

    `chat` selects the format of `/v1/chat/completions`, else it is that of `/v1/completions`. `with_usage` adds a last
    chunk with token counts; `with_events` adds step events and complete replies in the chunks' field `lookahead`.
    """

    streams: Sequence[AsyncGenerator[GenerateEvent, None]]
    choices: int
    model: str
    _: KW_ONLY
    chat: bool
    with_usage: bool = False
    with_events: bool = False

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.chat else "cmpl"
        self._base = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}
        self._finished: dict[int, ChatReply] = {}
        self._started: set[int] = set()

    async def body(self) -> AsyncGenerator[str, None]:
        """Yield all replies as one JSON object."""
        async with aclosing(merge(self.streams)) as events:
            async for index, event in events:
                if isinstance(event, ChatReply):
                    self._finished[index] = event
        replies = sorted(self._finished.items())
        content = {
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": [{"index": index, "logprobs": None} | self._choice(reply) for index, reply in replies],
            "usage": self._usage(),
            "lookahead": [reply_metadata(reply) for _, reply in replies],
        }
        yield json.dumps(self._base | content)

    def _choice(self, reply: ChatReply) -> dict[str, Any]:
        if not self.chat:
            return {"text": reply.content, "finish_reason": reply.finish_reason}
        calls = _tool_calls(reply)
        message = {
            "role": "assistant",
            "content": reply.content or (None if calls else ""),
            **dict.fromkeys(_THINKING_KEYS, reply.thinking or None),
            "tool_calls": calls or None,
        }
        return {"message": message, "finish_reason": _finish_reason(reply)}

    async def events(self, errors: ErrorReplies) -> AsyncGenerator[str, None]:
        """Yield server-sent events up to `[DONE]`; an error after the first one becomes an event, not an exception."""
        has_sent = False
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in with_pings(chunks) if self.with_events else chunks:
                    # A comment is a sign of life for this user's programs.
                    yield f"data: {json.dumps(chunk)}\n\n" if chunk is not None else ":\n\n"
                    has_sent = True
        except Exception as error:
            if not has_sent:
                raise
            yield f"data: {json.dumps(errors.describe(error)[1])}\n\n"
        yield "data: [DONE]\n\n"

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        base = self._base | {"object": "chat.completion.chunk" if self.chat else "text_completion"}
        base |= {"usage": None} if self.with_usage else {}
        async with aclosing(merge(self.streams)) as events:
            async for index, event in events:
                if isinstance(event, StepEvent):
                    if self.with_events:
                        yield base | {"choices": [], "lookahead": event_to_json(event)}
                    continue
                text, reason = (event.text, None) if isinstance(event, TextDelta) else ("", event.finish_reason)
                parts = self._chat_parts(index, event) if self.chat else [{"text": text, "finish_reason": reason}]
                chunks = [base | {"choices": [{"index": index, "logprobs": None} | part]} for part in parts]
                if isinstance(event, ChatReply):
                    self._finished[index] = event
                    chunks[-1]["lookahead"] = event_to_json(event) if self.with_events else reply_metadata(event)
                for chunk in chunks:
                    yield chunk
        if self.with_usage:
            yield base | {"choices": [], "usage": self._usage()}

    def _chat_parts(self, index: int, event: TextDelta | ChatReply) -> Iterator[dict[str, Any]]:
        role = {} if index in self._started else {"role": "assistant"}
        self._started.add(index)
        if isinstance(event, TextDelta):
            kinds = _THINKING_KEYS if event.kind == "thinking" else ("content",)
            yield {"delta": role | dict.fromkeys(kinds, event.text), "finish_reason": None}
            return
        calls = {"tool_calls": _tool_calls(event)} if _tool_calls(event) else {}
        if calls and not event.invalid_tool_calls:
            yield {"delta": role | calls, "finish_reason": None}
            role, calls = {}, {}
        elif calls and role:  # OpenAI's client stores the first chunk unprocessed
            yield {"delta": role | {"content": ""}, "finish_reason": None}
            role = {}
        # Truncated arguments go out with the finish reason, for clients that parse them while they stream.
        yield {"delta": role | calls, "finish_reason": _finish_reason(event)}

    def _usage(self) -> dict[str, Any]:
        """Token counts; a prompt counts once, whatever its number of choices."""
        first = [reply for index, reply in self._finished.items() if index % self.choices == 0]
        prompt = sum(reply.prompt_tokens for reply in first)
        cached = sum(reply.lookahead["prompt_tokens"]["target"]["cached"] or 0 for reply in first)
        completion = sum(len(reply.token_ids) for reply in self._finished.values())
        thinking = sum(reply.thinking_tokens for reply in self._finished.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {"reasoning_tokens": thinking},
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _tool_calls(reply: ChatReply) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's format, invalid ones included: clients report these themselves."""
    calls = calls_as_text(reply.tool_calls, reply.invalid_tool_calls)
    return [
        {"id": call_id or "", "type": "function", "function": {"name": name or "", "arguments": args}, "index": index}
        for index, (call_id, name, args) in enumerate(calls)
    ]


def _finish_reason(reply: ChatReply) -> str:
    """The reply's finish reason, but "tool_calls" if all its calls are invalid: clients receive these as calls."""
    return "tool_calls" if reply.finish_reason == "stop" and _tool_calls(reply) else reply.finish_reason


def reply_metadata(reply: ChatReply) -> dict[str, Any]:
    """The public part of a reply's metadata: policy, steps, acceptance, and what ended speculation or thinking."""
    names = ("policy", "steps", "accepted", "acceptance_rate", "thinking_ended_by_budget")
    metadata = {name: reply.lookahead[name] for name in names}
    return metadata | {"speculation_disabled": reply.lookahead["speculation_disabled"] is not None}


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of several streams in order of arrival with their stream's index; a failed stream ends all."""

    async def read_all(emit: Callable[[tuple[int, T]], None]) -> None:
        async def read(index: int, stream: AsyncGenerator[T, None]) -> None:
            async with aclosing(stream):
                async for item in stream:
                    emit((index, item))

        await gather_or_cancel([read(index, stream) for index, stream in enumerate(streams)])

    async with aclosing(event_stream(read_all)) as merged:
        async for numbered in merged:
            yield numbered


async def with_pings(items: AsyncGenerator[T, None], seconds: float = PING_SECONDS) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None whenever none arrives for this time."""
    while True:
        following = asyncio.ensure_future(anext(items))
        try:
            while not (await asyncio.wait({following}, timeout=seconds))[0]:
                yield None
            yield await following
        except StopAsyncIteration:
            return
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


class ReplyResponse(StreamingResponse):
    """A streamed body. A client's disconnect cancels it; an error before its first part keeps its HTTP status."""

    def __init__(self, parts: AsyncGenerator[str, None], media_type: str) -> None:
        super().__init__([], media_type=media_type, headers={"Cache-Control": "no-cache"})
        self._parts = parts

    async def stream_response(self, send: Send) -> None:
        """Send the body once its first part is there."""

        async def from_first(first: str) -> AsyncGenerator[str, None]:
            yield first
            async for part in self._parts:
                yield part

        async with aclosing(self._parts):
            self.body_iterator = from_first(await anext(self._parts))
            await super().stream_response(send)
