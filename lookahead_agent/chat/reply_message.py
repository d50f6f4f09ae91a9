"""The LangChain message of a reply, and the chunks of one that is still written."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk

from lookahead_agent.chat.messages import THINKING_KEY
from lookahead_agent.generation.request import ChatReply, ChatRequest, TextDelta
from lookahead_agent.generation.tool_calls import as_unreadable


def as_message(reply: ChatReply, request: ChatRequest, model_name: str, *, with_token_ids: bool) -> AIMessage:
    """The LangChain message of a reply."""
    report = reply.report
    metadata: dict[str, Any] = {
        "model_name": model_name,
        "model_provider": "lookahead",
        "finish_reason": reply.finish_reason,
        "lookahead": {
            "call": request.id,
            "policy": request.policy.name,
            "selection_rule": request.policy.rule,
            "certificate": reply.certificate,
            "audit": asdict(reply.audit),
            "node": request.path.node,
            "path": str(request.path) or None,
            "mode": reply.chosen.mode,
            "mode_reason": reply.chosen.reason,
            "engines": reply.engines,
            "steps": report.steps,
            "accepted": report.accepted,
            "acceptance_rate": report.acceptance_rate,
            "verifier_calls": report.verifier_calls,
            "judge_calls": report.judge_calls,
            "refuted": report.refuted,
            "target_forward_passes": report.target_forward_passes,
            "tokens": {"target": asdict(report.target_tokens), "draft": asdict(report.draft_tokens)},
            "seconds": report.seconds,
            "speculation_disabled": reply.problem,
        },
    }
    if with_token_ids:
        metadata["token_ids"] = reply.token_ids
    return AIMessage(
        content=reply.parsed.content,
        additional_kwargs={THINKING_KEY: reply.thinking} if reply.thinking else {},
        tool_calls=reply.parsed.tool_calls,
        invalid_tool_calls=reply.parsed.invalid_tool_calls,
        response_metadata=metadata,
        usage_metadata=UsageMetadata(
            input_tokens=reply.prompt_tokens,
            output_tokens=len(reply.token_ids),
            total_tokens=reply.prompt_tokens + len(reply.token_ids),
            output_token_details=OutputTokenDetails(reasoning=reply.thinking_tokens),
        ),
    )


class _WholeReply(AIMessageChunk):
    """The sum of a reply's chunks: LangChain takes the class from which theirs is derived."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A message, of this class; of a derived one a chunk."""
        return AIMessage(*args, **kwargs) if cls is _WholeReply else super().__new__(cls)


class ReplyChunk(_WholeReply):
    """A chunk of a reply, whose sum with others still has its invalid calls as they are.

    LangChain reads the calls of a sum of chunks anew: it forgets why one is invalid, and completes what ended early.
    """

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
    calls = [
        tool_call_chunk(name=call["name"], args=json.dumps(call["args"]), id=call["id"], index=index)
        for index, call in enumerate(item.tool_calls)
    ]
    calls += [
        tool_call_chunk(
            name=call["name"],
            args=as_unreadable(call["args"] or ""),
            id=call["id"],
            index=len(item.tool_calls) + index,
        )
        for index, call in enumerate(item.invalid_tool_calls)
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
