"""Converts the events of a reply for LangChain: its message, the chunks of a stream, and step callbacks."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from langchain_core.callbacks import CallbackManager, adispatch_custom_event, dispatch_custom_event
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.runnables.config import RunnableConfig, ensure_config, get_callback_manager_for_config

from lookahead_agent.chat.messages import THINKING_KEY
from lookahead_agent.chat.requests import RunManager
from lookahead_agent.decoding.request import STEP_EVENT, StepEvent
from lookahead_agent.generation.backend import ChatReply, GenerateRequest, TextDelta
from lookahead_agent.generation.tool_calls import calls_as_text


def as_message(reply: ChatReply, model_name: str, *, with_token_ids: bool) -> AIMessage:
    """Convert a reply to a LangChain message."""
    metadata: dict[str, Any] = {"model_name": model_name, "model_provider": "lookahead"}
    metadata |= {"finish_reason": reply.finish_reason, "lookahead": reply.lookahead}
    if with_token_ids:
        metadata["token_ids"] = reply.token_ids
    cached = reply.lookahead["prompt_tokens"]["target"]["cached"]
    return AIMessage(
        content=reply.content,
        additional_kwargs={THINKING_KEY: reply.thinking} if reply.thinking else {},
        tool_calls=reply.tool_calls,
        invalid_tool_calls=reply.invalid_tool_calls,
        response_metadata=metadata,
        usage_metadata=UsageMetadata(
            input_tokens=reply.prompt_tokens,
            output_tokens=len(reply.token_ids),
            total_tokens=reply.prompt_tokens + len(reply.token_ids),
            input_token_details=InputTokenDetails() if cached is None else InputTokenDetails(cache_read=cached),
            output_token_details=OutputTokenDetails(reasoning=reply.thinking_tokens),
        ),
    )


class _ReplyMessage(AIMessageChunk):
    """Base of `ReplyChunk` that constructs an `AIMessage`: LangChain converts a chunk to its base class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an `AIMessage`, or for a subclass a chunk."""
        return AIMessage(*args, **kwargs) if cls is _ReplyMessage else super().__new__(cls)


class ReplyChunk(_ReplyMessage):
    """A chunk of a reply; a sum of chunks has their invalid tool calls unchanged."""

    # LangChain parses the calls of a sum again: it drops the error of an invalid call, and completes truncated JSON.

    @classmethod
    def lc_id(cls) -> list[str]:
        """Return the id of `AIMessageChunk`, so that LangChain serializes this class as its own."""
        return AIMessageChunk.lc_id()

    def __add__(self, other: Any) -> Any:
        """Add chunks, and keep the invalid calls of all."""
        summed = super().__add__(other)
        if isinstance(summed, ReplyChunk):
            others = other if isinstance(other, (list, tuple)) else [other]
            summed.invalid_tool_calls = [call for chunk in (self, *others) for call in chunk.invalid_tool_calls]
        return summed


def as_chunk(item: TextDelta | AIMessage) -> AIMessageChunk:
    """Convert a piece of text, or the parts of the final message that were not streamed as text."""
    if isinstance(item, TextDelta):
        if item.kind == "thinking":
            return ReplyChunk(content="", additional_kwargs={THINKING_KEY: item.text})
        return ReplyChunk(content=item.text)
    call_texts = calls_as_text(item.tool_calls, item.invalid_tool_calls)
    call_chunks = [
        tool_call_chunk(name=name, args=arguments, id=identifier, index=index)
        for index, (identifier, name, arguments) in enumerate(call_texts)
    ]
    chunk = ReplyChunk(
        content="",
        tool_call_chunks=call_chunks,
        response_metadata=item.response_metadata,
        usage_metadata=item.usage_metadata,
        chunk_position="last",
    )
    chunk.invalid_tool_calls = list(item.invalid_tool_calls)
    return chunk


class StepCallbacks:
    """Passes step events to callbacks, and with `to_stream` also to LangGraph's custom stream.

    `has_listeners` says whether anything receives them.
    """

    def __init__(self, request: GenerateRequest, to_stream: bool, run: RunManager | None) -> None:
        self._call_metadata = {"call": request.id, "path": request.node or None, "policy": request.policy.name}
        self._write_to_stream: Callable[[Any], None] | None = None
        if to_stream:
            from langgraph.config import get_stream_writer

            with suppress(RuntimeError):  # the call is outside a graph
                self._write_to_stream = get_stream_writer()
        # LangChain's streaming path passes no run: use the callbacks of the model's caller.
        run_callbacks = CallbackManager(run.handlers, parent_run_id=run.run_id) if run is not None else None
        callbacks = run_callbacks or get_callback_manager_for_config(ensure_config())
        in_run = callbacks.parent_run_id is not None and callbacks.handlers
        self._config: RunnableConfig | None = {"callbacks": callbacks} if in_run else None
        self.has_listeners = self._config is not None or self._write_to_stream is not None

    def send(self, event: StepEvent) -> None:
        """Send an event from a synchronous call."""
        data = asdict(event) | self._call_metadata
        if self._config is not None:
            dispatch_custom_event(STEP_EVENT, data, config=self._config)
        if self._write_to_stream is not None:
            self._write_to_stream({STEP_EVENT: data})

    async def asend(self, event: StepEvent) -> None:
        """`send` for callers in an event loop."""
        data = asdict(event) | self._call_metadata
        if self._config is not None:
            await adispatch_custom_event(STEP_EVENT, data, config=self._config)
        if self._write_to_stream is not None:
            self._write_to_stream({STEP_EVENT: data})
