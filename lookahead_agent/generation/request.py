"""What is asked of one reply, and what it comes to."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lookahead_agent.certificates.drift_monitor import DriftCounts
from lookahead_agent.decoding import ReplyReport, StepEvent
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.generation.policy_choice import NodePath
from lookahead_agent.generation.tool_calls import ParsedReply
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.modes import ModeChoice


@dataclass(frozen=True)
class TextDelta:
    """Text that is certain to be part of the reply."""

    kind: Literal["thinking", "answer"]
    text: str


Emit = Callable[[TextDelta | StepEvent], None]


@dataclass(frozen=True)
class ChatRequest:
    """What to reply to, decided.

    Attributes:
        messages: For the chat template, or a prompt as it is: text or token ids.
        question: The text that the reply answers.
        sampling: How tokens are chosen.
        policy: The call's.
        path: The graph's node that makes the call.
        options: Tools and the reply's form.
        target_timeout: Seconds without a token after which the target has failed; None: never.
        longest_prompt: In tokens; None: the context.
        audit_rate: Share of the steps accepted by a certificate that are looked at again.
        id: Which call it is, in its step events and its reply's metadata.
    """

    messages: list[dict[str, Any]] | str | list[int]
    question: str
    sampling: Sampling
    policy: VerifierPolicy
    path: NodePath
    options: CallOptions
    target_timeout: float | None = None
    longest_prompt: int | None = None
    audit_rate: float = 0.0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_chat(self) -> bool:
        """Whether there are messages, and not a prompt as it is."""
        return isinstance(self.messages, list) and not (self.messages and isinstance(self.messages[0], int))


@dataclass
class ChatReply:
    """A reply, complete.

    Attributes:
        parsed: The answer: its text and its tool calls.
        thinking: What was thought before.
        prompt_tokens: Length of the prompt in tokens.
        token_ids: The reply's tokens.
        finish_reason: "length": the tokens of the reply or of the context were used up, whatever had been read by then;
            "tool_calls": the reply ended otherwise and has calls that can be carried out; "stop": neither. A reply
            whose calls are all invalid has the reason of one without calls.
        report: Where tokens and time went.
        problem: Why there was no speculation, or none to the end; None if there was.
        chosen: In which mode it was written, and why.
        engines: How the engines were arranged.
        certificate: Of a policy that states a risk: by which certificate its verifier was chosen, or why it is `exact`.
        audit: What became of accepted steps that were looked at again, since the engines were started.
        thinking_tokens: How many of the tokens are thinking, without its tags.
    """

    parsed: ParsedReply
    thinking: str
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    report: ReplyReport = field(default_factory=ReplyReport)
    problem: str | None = None
    chosen: ModeChoice = field(default_factory=lambda: ModeChoice("off", ""))
    engines: dict[str, Any] = field(default_factory=dict)
    certificate: str | None = None
    audit: DriftCounts = field(default_factory=DriftCounts)
    thinking_tokens: int = 0
