"""The replies to one request in the two forms of OpenAI's API, of a chat and of a text, whole or in events."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Send

from lookahead_agent.decoding import StepEvent
from lookahead_agent.engines.background import all_of
from lookahead_agent.generation.backend import ChatReply, GenerateEvent, TextDelta, event_to_json
from lookahead_agent.generation.tool_calls import calls_as_text
from lookahead_agent.server.errors import ErrorReplies

T = TypeVar("T")


@dataclass(eq=False)
class Replies:
    """The replies to one request, whole or in chunks; a stream generates each, `choices` for each of the prompts.

    With `chat`, their form is that of `/v1/chat/completions`, else that of `/v1/completions`. With `with_usage`, a last
    chunk tells the tokens; with `with_events`, chunks tell steps and the whole reply in their field `lookahead`.
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
        self._done: dict[int, ChatReply] = {}
        self._started: set[int] = set()

    async def body(self) -> AsyncGenerator[str, None]:
        """All replies in one JSON object."""
        async with aclosing(merge(self.streams)) as events:
            async for index, event in events:
                if isinstance(event, ChatReply):
                    self._done[index] = event
        replies = sorted(self._done.items())
        whole = {
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": [{"index": index, "logprobs": None} | self._choice(reply) for index, reply in replies],
            "usage": self._usage(),
            "lookahead": [_figures(reply) for _, reply in replies],
        }
        yield json.dumps(self._base | whole)

    def _choice(self, reply: ChatReply) -> dict[str, Any]:
        if not self.chat:
            return {"text": reply.content, "finish_reason": reply.finish_reason}
        calls = _calls(reply)
        message = {
            "role": "assistant",
            "content": reply.content or (None if calls else ""),
            "reasoning_content": reply.thinking or None,
            "tool_calls": calls or None,
        }
        return {"message": message, "finish_reason": _finish_reason(reply)}

    async def events(self, errors: ErrorReplies) -> AsyncGenerator[str, None]:
        """Server-sent events, ended by `[DONE]`; an error after the first is the last."""
        begun = False
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield f"data: {json.dumps(chunk)}\n\n"
                    begun = True
        except Exception as error:
            if not begun:
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
                    self._done[index] = event
                    chunks[-1]["lookahead"] = event_to_json(event) if self.with_events else _figures(event)
                for chunk in chunks:
                    yield chunk
        if self.with_usage:
            yield base | {"choices": [], "usage": self._usage()}

    def _chat_parts(self, index: int, event: TextDelta | ChatReply) -> Iterator[dict[str, Any]]:
        role = {} if index in self._started else {"role": "assistant"}
        self._started.add(index)
        if isinstance(event, TextDelta):
            kind = "reasoning_content" if event.kind == "thinking" else "content"
            yield {"delta": role | {kind: event.text}, "finish_reason": None}
            return
        calls = {"tool_calls": _calls(event)} if _calls(event) else {}
        if calls and not event.invalid_tool_calls:
            yield {"delta": role | calls, "finish_reason": None}
            role, calls = {}, {}
        elif calls and role:  # OpenAI's client takes the first chunk as it is
            yield {"delta": role | {"content": ""}, "finish_reason": None}
            role = {}
        # Clients that read arguments while they stream must know by then that these were cut off.
        yield {"delta": role | calls, "finish_reason": _finish_reason(event)}

    def _usage(self) -> dict[str, Any]:
        """The tokens: of each prompt once."""
        first = [reply for index, reply in self._done.items() if index % self.choices == 0]
        prompt = sum(reply.prompt_tokens for reply in first)
        cached = sum(reply.lookahead["prompt_tokens"]["target"]["cached"] or 0 for reply in first)
        completion = sum(len(reply.token_ids) for reply in self._done.values())
        thinking = sum(reply.thinking_tokens for reply in self._done.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {"reasoning_tokens": thinking},
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _calls(reply: ChatReply) -> list[dict[str, Any]]:
    """Tool calls, also those that cannot be read: clients report these themselves."""
    written = calls_as_text(reply.tool_calls, reply.invalid_tool_calls)
    return [
        {"id": each or "", "type": "function", "function": {"name": name or "", "arguments": given}, "index": index}
        for index, (each, name, given) in enumerate(written)
    ]


def _finish_reason(reply: ChatReply) -> str:
    """As of the reply; but "tool_calls" also where all calls are invalid, since clients are told of them as calls."""
    return "tool_calls" if reply.finish_reason == "stop" and _calls(reply) else reply.finish_reason


def _figures(reply: ChatReply) -> dict[str, Any]:
    """How a reply came about: its steps, those of them that are accepted draft steps, whether speculation ended."""
    figures = {name: reply.lookahead[name] for name in ("policy", "steps", "accepted", "acceptance_rate")}
    return figures | {"speculation_disabled": reply.lookahead["speculation_disabled"] is not None}


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several streams in order of arrival, each with the number of its stream; one that fails ends all."""
    items: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def read(number: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                items.put_nowait((number, item))

    reading = asyncio.ensure_future(all_of([read(number, stream) for number, stream in enumerate(streams)]))
    reading.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


class ReplyResponse(StreamingResponse):
    """A body that takes long to make. A client that goes away stops it; an error before it has a status of its own."""

    def __init__(self, parts: AsyncGenerator[str, None], media_type: str) -> None:
        super().__init__([], media_type=media_type, headers={"Cache-Control": "no-cache"})
        self._parts = parts

    async def stream_response(self, send: Send) -> None:
        """Send it."""

        async def whole(first: str) -> AsyncGenerator[str, None]:
            yield first
            async for part in self._parts:
                yield part

        async with aclosing(self._parts):
            self.body_iterator = whole(await anext(self._parts))
            await super().stream_response(send)
