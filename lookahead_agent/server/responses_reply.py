"""A reply in the format of OpenAI's `/v1/responses`, built of the types of OpenAI's SDK.

The SDK's import takes seconds, so that the application imports this module with the first such request.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any, Literal, cast

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseError,
    ResponseFailedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItem,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseReasoningSummaryPartAddedEvent,
    ResponseReasoningSummaryPartDoneEvent,
    ResponseReasoningSummaryTextDeltaEvent,
    ResponseReasoningSummaryTextDoneEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseReasoningTextDoneEvent,
    ResponseStreamEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_content_part_added_event import PartReasoningText
from openai.types.responses.response_reasoning_item import Content, Summary
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel

from lookahead_agent.generation.backend import ChatReply, GenerateEvent, GenerateRequest, TextDelta
from lookahead_agent.generation.tool_calls import calls_as_text
from lookahead_agent.server.errors import ErrorReplies
from lookahead_agent.server.replies import reply_metadata
from lookahead_agent.server.responses_request import ResponseRequestBody

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons of incomplete responses, by finish reason."""


def new_id(prefix: str) -> str:
    """Return a random id."""
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseReply:
    """The response to one request, whole or as events.

    `store` takes the response as JSON values before its last event, and returns whether the server keeps it; None keeps
    none. Thinking, answers and calls are items of the response in the order in which the model writes them.
    """

    def __init__(
        self,
        stream: AsyncGenerator[GenerateEvent, None],
        body: ResponseRequestBody,
        request: GenerateRequest,
        model: str,
        store: Callable[[dict[str, Any]], bool] | None,
    ) -> None:
        self._stream = stream
        self._store = store
        self._has_summary = body.has_summary
        self._sequence = 0
        self._item: _OpenItem | None = None
        self._response = Response.model_validate(
            {
                "id": new_id("resp"),
                "object": "response",
                "created_at": int(time.time()),
                "status": "in_progress",
                "model": model,
                "error": None,
                "incomplete_details": None,
                "instructions": body.instructions,
                "max_output_tokens": body.max_output_tokens,
                "metadata": body.metadata or {},
                "output": [],
                "parallel_tool_calls": body.parallel_tool_calls is not False,
                "previous_response_id": body.previous_response_id,
                "reasoning": body.reasoning,
                "store": store is not None,
                "temperature": request.sampling.temperature,
                "text": {"format": {"type": "text"}} | body.text,
                "tool_choice": body.tool_choice or "auto",
                "tools": body.tools,
                "top_p": request.sampling.top_p,
                "truncation": "disabled",
                "usage": None,
                "user": body.user,
            }
        )

    async def body(self) -> AsyncGenerator[str, None]:
        """Yield the response as one JSON object."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        yield json.dumps(as_json(self._response))

    async def events(self, errors: ErrorReplies) -> AsyncGenerator[str, None]:
        """Yield server-sent events; an error after the first one becomes the event of a failed response."""
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield _as_sent(event)
        except Exception as error:
            if not self._sequence:
                raise
            refused, content = errors.describe(error)
            code: Any = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(refused.status, "server_error")
            self._response.status = "failed"
            self._response.error = ResponseError(code=code, message=content["error"]["message"])
            yield _as_sent(self._number(ResponseFailedEvent, type="response.failed", response=self._response))

    async def _events(self) -> AsyncGenerator[ResponseStreamEvent, None]:
        async with aclosing(self._stream) as events:
            async for event in events:
                if not self._sequence:
                    snapshot = self._response.model_copy()
                    yield self._number(ResponseCreatedEvent, type="response.created", response=snapshot)
                    yield self._number(ResponseInProgressEvent, type="response.in_progress", response=snapshot)
                if isinstance(event, TextDelta):
                    for each in self._add_text(event.kind, event.text):
                        yield each
                elif isinstance(event, ChatReply):
                    for each in self._end(event):
                        yield each

    def _add_text(self, kind: Literal["thinking", "answer"], text: str) -> Iterator[ResponseStreamEvent]:
        if self._item is not None and self._item.kind != kind:
            yield from self._close_item("completed")
        if self._item is None:
            is_summary = kind == "thinking" and self._has_summary
            self._item = _OpenItem(kind, is_summary, new_id("rs" if kind == "thinking" else "msg"))
            yield self._at_item(
                ResponseOutputItemAddedEvent,
                type="response.output_item.added",
                item=self._item.as_output("in_progress", is_empty=True),
            )
            added = ResponseReasoningSummaryPartAddedEvent if is_summary else ResponseContentPartAddedEvent
            yield self._in_part(added, "part.added", part=self._item.part(""))
        self._item.text += text
        if text:
            yield self._in_part(self._item.delta_event, "delta", delta=text)

    def _close_item(self, status: Literal["completed", "incomplete"]) -> Iterator[ResponseStreamEvent]:
        if (item := self._item) is None:
            return
        yield self._in_part(item.done_event, "done", text=item.text)
        done = ResponseReasoningSummaryPartDoneEvent if item.is_summary else ResponseContentPartDoneEvent
        yield self._in_part(done, "part.done", part=item.part(item.text))
        output = item.as_output(status)
        yield self._at_item(ResponseOutputItemDoneEvent, type="response.output_item.done", item=output)
        self._item = None
        self._response.output = [*self._response.output, output]

    def _add_call(self, call: ResponseFunctionToolCall) -> Iterator[ResponseStreamEvent]:
        opened = call.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._at_item(ResponseOutputItemAddedEvent, type="response.output_item.added", item=opened)
        name = "response.function_call_arguments"
        ids = {"item_id": call.id}
        yield self._at_item(ResponseFunctionCallArgumentsDeltaEvent, type=f"{name}.delta", delta=call.arguments, **ids)
        yield self._at_item(
            ResponseFunctionCallArgumentsDoneEvent,
            type=f"{name}.done",
            arguments=call.arguments,
            name=call.name,
            **ids,
        )
        yield self._at_item(ResponseOutputItemDoneEvent, type="response.output_item.done", item=call)
        self._response.output = [*self._response.output, call]

    def _end(self, reply: ChatReply) -> Iterator[ResponseStreamEvent]:
        reason = _INCOMPLETE.get(reply.finish_reason)
        status: Literal["completed", "incomplete"] = "completed" if reason is None else "incomplete"
        calls = calls_as_text(reply.tool_calls, reply.invalid_tool_calls)
        if self._item is None and not self._response.output and not calls:
            yield from self._add_text("answer", "")
        yield from self._close_item("completed" if calls else status)
        for number, (call_id, name, arguments) in enumerate(calls, 1):
            call = ResponseFunctionToolCall(
                id=new_id("fc"),
                call_id=call_id or new_id("call"),
                name=name or "",
                arguments=arguments,
                type="function_call",
                status=status if number == len(calls) else "completed",
            )
            yield from self._add_call(call)
        cached = reply.lookahead["prompt_tokens"]["target"]["cached"] or 0
        usage = ResponseUsage(
            input_tokens=reply.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
            output_tokens=len(reply.token_ids),
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reply.thinking_tokens),
            total_tokens=reply.prompt_tokens + len(reply.token_ids),
        )
        ended: dict[str, Any] = {"status": status, "usage": usage, "lookahead": reply_metadata(reply)}
        if reason is None:
            ended["completed_at"] = int(time.time())
        else:
            ended["incomplete_details"] = IncompleteDetails.model_validate({"reason": reason})
        self._response = self._response.model_copy(update=ended)
        if self._store is not None:
            is_kept = self._store(as_json(self._response))
            self._response = self._response.model_copy(update={"store": is_kept})
        last = ResponseCompletedEvent if reason is None else ResponseIncompleteEvent
        yield self._number(last, type=f"response.{status}", response=self._response)

    def _number(self, event: type[BaseModel], **fields: Any) -> ResponseStreamEvent:
        self._sequence += 1
        # The values are of the SDK's types, and events are frequent: they are not validated again.
        return cast(ResponseStreamEvent, event.model_construct(**fields, sequence_number=self._sequence - 1))

    def _at_item(self, event: type[BaseModel], **fields: Any) -> ResponseStreamEvent:
        return self._number(event, output_index=len(self._response.output), **fields)

    def _in_part(self, event: type[BaseModel], name: str, **fields: Any) -> ResponseStreamEvent:
        assert self._item is not None
        return self._at_item(event, item_id=self._item.id, **self._item.place(name), **fields)


class _OpenItem:
    """A reasoning item or a message while its only part is written."""

    def __init__(self, kind: Literal["thinking", "answer"], is_summary: bool, item_id: str) -> None:
        self.kind = kind
        self.is_summary = is_summary
        self.id = item_id
        self.text = ""
        if kind == "answer":
            self.delta_event: type[BaseModel] = ResponseTextDeltaEvent
            self.done_event: type[BaseModel] = ResponseTextDoneEvent
        elif is_summary:
            self.delta_event = ResponseReasoningSummaryTextDeltaEvent
            self.done_event = ResponseReasoningSummaryTextDoneEvent
        else:
            self.delta_event = ResponseReasoningTextDeltaEvent
            self.done_event = ResponseReasoningTextDoneEvent

    def place(self, name: str) -> dict[str, Any]:
        """Return an event's type, and the index of the part."""
        text = "reasoning_summary" if self.is_summary else "reasoning" if self.kind == "thinking" else "output"
        part = "reasoning_summary" if self.is_summary else "content"
        fields: dict[str, Any] = {"summary_index" if self.is_summary else "content_index": 0}
        if name.startswith("part."):
            return fields | {"type": f"response.{part}_{name}"}
        return fields | {"type": f"response.{text}_text.{name}"} | ({"logprobs": []} if text == "output" else {})

    def part(self, text: str) -> BaseModel:
        """Return the part with this text."""
        if self.kind == "answer":
            return ResponseOutputText(type="output_text", text=text, annotations=[], logprobs=[])
        if self.is_summary:
            return Summary(type="summary_text", text=text)
        return PartReasoningText(type="reasoning_text", text=text)

    def as_output(
        self, status: Literal["in_progress", "completed", "incomplete"], *, is_empty: bool = False
    ) -> ResponseOutputItem:
        """Return the item, or the item before its first part."""
        if self.kind == "answer":
            text = ResponseOutputText(type="output_text", text=self.text, annotations=[], logprobs=[])
            return ResponseOutputMessage(
                id=self.id, type="message", role="assistant", status=status, content=[] if is_empty else [text]
            )
        content = Content(type="reasoning_text", text=self.text)
        summary = Summary(type="summary_text", text=self.text)
        return ResponseReasoningItem(
            id=self.id,
            type="reasoning",
            status=status,
            summary=[summary] if self.is_summary and not is_empty else [],
            content=[content] if not self.is_summary and not is_empty else [],
        )


def as_json(model: BaseModel) -> dict[str, Any]:
    """Return one of the SDK's values as JSON values, with the names of the API."""
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True, serialize_as_any=True)


def _as_sent(event: ResponseStreamEvent) -> str:
    return f"event: {event.type}\ndata: {json.dumps(as_json(event))}\n\n"
