"""The decoder's request, settings, reply, and the events of its steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lookahead_agent.decoding.accounting import ReplyReport
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.thinking_tags import ThinkingTags

PROMPT_TAIL = 32
"""Tokens at a prompt's end in which a chat template may have opened the thinking."""


@dataclass(frozen=True)
class DecodingSettings:
    """How far and how to look ahead.

    Attributes:
        depth: Steps in flight at the front (γ); 0 runs the target alone.
        width: Draft candidates per position (w). The first is the draft's own choice; at temperature 0 the others are
            sampled at `draft_temperature`.
        draft_temperature: See `width`.
        delimiter: Text, or pattern, that ends a step.
        max_step_tokens: Length limit of one step in tokens; a step cut there is never accepted.
        step_tokens: Tokens of every step, whatever its text: for measurements with random weights. None:
            steps end by their text.
        hedge: Whether the target goes on after its own step while the verifier thinks.
        synchronous: Whether to work in rounds (the paper's simpler variant).
        early: Whether a draft step is dropped as soon as the verifier is certain to reject it.
        shared_draft: Whether a target with a shared draft takes the draft's tokens, and the draft writes on from the
            target's tokens where it has no step of its own to write.
        verifier_timeout: Seconds after which a verifier that does not answer turns speculation off.
        draft_timeout: Seconds without a token after which a draft that should write turns speculation off.
        target_timeout: Seconds without a token after which the target has failed; None: never.
    """

    depth: int = 4
    width: int = 1
    draft_temperature: float = 0.7
    delimiter: str | re.Pattern[str] = "\n\n"
    max_step_tokens: int = 256
    step_tokens: int | None = None
    hedge: bool = True
    synchronous: bool = False
    early: bool = True
    shared_draft: bool = True
    verifier_timeout: float = 60.0
    draft_timeout: float = 120.0
    target_timeout: float | None = None


@dataclass(frozen=True)
class Regions:
    """What in a reply only the target may write.

    Attributes:
        action_markers: Texts that open an action region, such as a tool call.
        thinking: The model's thinking tags; None for models that do not think apart. A step never goes over the
            closing tag.
        answer_from_target: Whether what follows the thinking is the target's alone. A reply without thinking is then
            all the target's.
    """

    action_markers: tuple[str, ...] = ()
    thinking: ThinkingTags | None = None
    answer_from_target: bool = False

    def begins_outside_thinking(self, prompt: str) -> bool:
        """Whether a reply to this prompt begins where only the target may write."""
        if self.thinking is None or not self.answer_from_target:
            return False
        return not self.thinking.opened_by(prompt)


@dataclass(frozen=True)
class ReplyRequest:
    """What to reply to.

    Attributes:
        prompt_ids: Token ids of the whole prompt, shape (n,).
        sampling: Sampling parameters; `max_tokens` is the budget of the reply, `stop` its stop strings. A reply with
            a `structured` constraint is the target's alone.
        question: The text that the reply answers, for verifiers that want to know.
        regions: What only the target may write.
        draft_prompt_ids: The prompt in the draft's vocabulary, if that is another than the target's.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    question: str = ""
    regions: Regions = field(default_factory=Regions)
    draft_prompt_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Reply:
    """A complete reply.

    Attributes:
        text: Its text, without stop string and end-of-sequence.
        token_ids: Its tokens, with those of a stop string and the end-of-sequence.
        finish_reason: "stop" or "length".
        report: Its figures.
        text_ends: Length of the text after each token, a stop string included.
        cut: Whether the model had more to say: its tokens were used up, or a stop string was written.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: ReplyReport
    text_ends: tuple[int, ...] = ()
    cut: bool = False


StepEventKind = Literal["drafted", "written", "judged", "accepted", "committed", "rejected", "unused", "aborted"]


@dataclass(frozen=True)
class StepEvent:
    """Something that happened to a step.

    Attributes:
        kind: "drafted": the draft wrote it; "written": the target did; "judged": the verifier has decided about the
            draft's; "accepted": the draft's step is part of the reply; "committed": the target's is; "rejected": the
            draft's will not be used; "unused": the target's will not, since the draft's was; "aborted": it was
            stopped before it was complete.
        source: Whose step it is: "draft" or "target".
        position: Which step of the reply it would be, from 0.
        text: Its text, with the delimiter.
        started: When its writing (of "judged": its judging) began, in seconds since the reply did.
        ended: When that ended.
        verdict: The verifier's reason, in a word or two; None if it was not asked.
        score: The measure that was held against the threshold, if there is one.
    """

    kind: StepEventKind
    source: Literal["draft", "target"]
    position: int
    text: str
    started: float
    ended: float
    verdict: str | None = None
    score: float | None = None


STEP_EVENT = "lookahead_step"
"""Name of LangChain's custom events with a `StepEvent`'s fields, and `call`, `path` and `policy` of the reply."""

OnStep = Callable[[StepEvent], None]
