"""From a reply's events to LangChain's: its message, the chunks of a stream, and callbacks for steps."""

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
    """The LangChain message of a reply."""
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


class _WholeReply(AIMessageChunk):
    """The sum of a reply's chunks: LangChain takes the class from which theirs is derived."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A message, of this class; of a derived one a chunk."""
        return AIMessage(*args, **kwargs) if cls is _WholeReply else super().__new__(cls)


class ReplyChunk(_WholeReply):
    """A chunk of a reply, whose sum with others still has its invalid calls as they are."""

    # LangChain reads the calls of a sum of chunks anew: it forgets why one is invalid, and completes what ended early.

    @classmethod
    def lc_id(cls) -> list[str]:
        """LangChain writes it down as one of its own chunks."""
        return AIMessageChunk.lc_id()

    def __add__(self, other: Any) -> Any:
        """The sum, with the invalid calls of both."""
        summed = super().__add__(other)
        if isinstance(summed, ReplyChunk):
            others = other if isinstance(other, (list, tuple)) else [other]
            summed.invalid_tool_calls = [call for chunk in (self, *others) for call in chunk.invalid_tool_calls]
        return summed


def as_chunk(item: TextDelta | AIMessage) -> AIMessageChunk:
    """A piece of text, or what the final message adds to the text already streamed."""
    if isinstance(item, TextDelta):
        if item.kind == "thinking":
            return ReplyChunk(content="", additional_kwargs={THINKING_KEY: item.text})
        return ReplyChunk(content=item.text)
    written = calls_as_text(item.tool_calls, item.invalid_tool_calls)
    calls = [
        tool_call_chunk(name=name, args=arguments, id=identifier, index=index)
        for index, (identifier, name, arguments) in enumerate(written)
    ]
    chunk = ReplyChunk(
        content="",
        tool_call_chunks=calls,
        response_metadata=item.response_metadata,
        usage_metadata=item.usage_metadata,
        chunk_position="last",
    )
    chunk.invalid_tool_calls = list(item.invalid_tool_calls)
    return chunk


class StepCallbacks:
    """Passes step events on to callbacks, and with `to_stream` to LangGraph's custom stream."""

    def __init__(self, request: GenerateRequest, to_stream: bool, run: RunManager | None) -> None:
        self._call = {"call": request.id, "path": request.node or None, "policy": request.policy.name}
        self._write: Callable[[Any], None] | None = None
        if to_stream:
            from langgraph.config import get_stream_writer

            with suppress(RuntimeError):  # there is no graph
                self._write = get_stream_writer()
        # Without a run, as where LangChain streams, those of what calls the model.
        own = CallbackManager(run.handlers, parent_run_id=run.run_id) if run is not None else None
        callbacks = own or get_callback_manager_for_config(ensure_config())
        self._config: RunnableConfig | None = {"callbacks": callbacks} if callbacks.parent_run_id is not None else None

    def send(self, event: StepEvent) -> None:
        """Tell callers that wait for it."""
        data = asdict(event) | self._call
        if self._config is not None:
            dispatch_custom_event(STEP_EVENT, data, config=self._config)
        if self._write is not None:
            self._write({STEP_EVENT: data})

    async def asend(self, event: StepEvent) -> None:
        """`send` for callers in an event loop."""
        data = asdict(event) | self._call
        if self._config is not None:
            await adispatch_custom_event(STEP_EVENT, data, config=self._config)
        if self._write is not None:
            self._write({STEP_EVENT: data})
