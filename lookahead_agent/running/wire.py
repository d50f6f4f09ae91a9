"""Orders for replies, what is told of them, and replies: as frames and back."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from langchain_core.messages import AIMessage
from pydantic import TypeAdapter

from lookahead_agent import errors
from lookahead_agent.decoding import StepEvent
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.errors import EngineError, LookaheadError
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.generation.policy_choice import NodePath
from lookahead_agent.generation.request import ChatRequest, TextDelta
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.running.frames import Frame

_SAMPLING = TypeAdapter(Sampling)


@dataclass(frozen=True)
class ReplyOrder:
    """A reply that is asked for.

    Attributes:
        engines: Which engines are meant: `RuntimeSpec.digest`.
        request: What to reply to.
        model: The model's name in the reply's metadata.
        tool_parser: See `ChatLookahead`.
        with_token_ids: Whether the metadata list the reply's tokens.
    """

    engines: str
    request: ChatRequest
    model: str
    tool_parser: str | None = None
    with_token_ids: bool = False


def order_to_frame(order: ReplyOrder) -> Frame:
    """An order, to be sent."""
    request = order.request
    return {
        "order": "reply",
        "engines": order.engines,
        "model": order.model,
        "tool_parser": order.tool_parser,
        "with_token_ids": order.with_token_ids,
        "messages": request.messages,
        "question": request.question,
        "sampling": asdict(request.sampling),
        "policy": _policy_to_frame(request.policy),
        "path": list(request.path.names),
        # The policy was chosen where the call was made.
        "options": request.options.model_dump(exclude={"policy"}, exclude_unset=True),
        "target_timeout": request.target_timeout,
        "longest_prompt": request.longest_prompt,
        "audit_rate": request.audit_rate,
        "id": request.id,
    }


def order_from_frame(frame: Frame) -> ReplyOrder:
    """An order that was sent."""
    request = ChatRequest(
        messages=frame["messages"],
        question=frame["question"],
        sampling=_SAMPLING.validate_python(frame["sampling"]),
        policy=_policy_from_frame(frame["policy"]),
        path=NodePath(tuple(frame["path"])),
        options=CallOptions.model_validate(frame["options"]),
        target_timeout=frame["target_timeout"],
        longest_prompt=frame["longest_prompt"],
        audit_rate=frame["audit_rate"],
        id=frame["id"],
    )
    return ReplyOrder(frame["engines"], request, frame["model"], frame["tool_parser"], frame["with_token_ids"])


def _policy_to_frame(policy: VerifierPolicy) -> Frame:
    fields = policy.model_dump(exclude_unset=True)
    pattern = policy.delimiter if isinstance(policy.delimiter, re.Pattern) else None
    if pattern is not None:
        fields["delimiter"] = [pattern.pattern, pattern.flags]
    return {"fields": fields, "rule": policy.rule}


def _policy_from_frame(frame: Frame) -> VerifierPolicy:
    fields = dict(frame["fields"])
    if isinstance(delimiter := fields.get("delimiter"), list):
        fields["delimiter"] = re.compile(*delimiter)
    policy = VerifierPolicy(**fields)
    return policy.with_selection_rule(frame["rule"]) if frame["rule"] is not None else policy


def event_to_frame(event: TextDelta | StepEvent) -> Frame:
    """What is told of a reply while it is written, to be sent."""
    return {"delta" if isinstance(event, TextDelta) else "step": asdict(event)}


def event_from_frame(frame: Frame) -> TextDelta | StepEvent | None:
    """What was told of a reply; None for a frame of another kind."""
    if "delta" in frame:
        return TextDelta(**frame["delta"])
    if "step" in frame:
        return StepEvent(**frame["step"])
    return None


def message_to_frame(message: AIMessage) -> Frame:
    """A reply, to be sent."""
    return {"message": message.model_dump()}


def error_to_frame(error: LookaheadError) -> Frame:
    """Why there is none, to be sent."""
    return {"error": {"type": type(error).__name__, "text": str(error)}}


def error_from_frame(frame: Frame) -> LookaheadError:
    """Why there is none: the same error as in the keeper."""
    kind = getattr(errors, str(frame["error"]["type"]), EngineError)
    known = isinstance(kind, type) and issubclass(kind, LookaheadError)
    return (kind if known else EngineError)(frame["error"]["text"])
