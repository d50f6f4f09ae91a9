"""The decoder's request, settings, reply, and the events of its steps."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lookahead_agent.decoding.accounting import ReplyReport
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.protocol import Sampling

PROMPT_TAIL = 32  # tokens at a prompt's end in which a chat template may have opened the thinking


@dataclass(frozen=True)
class DecodingSettings:
    """The settings of looking ahead."""

    depth: int = 4  # steps in flight at the front (γ); 0 runs the target alone
    width: int = 1  # draft candidates per position (w), of which the first is the draft's own choice
    draft_temperature: float = 0.7  # at which the other candidates are sampled where the reply is greedy
    delimiter: str | re.Pattern[str] = "\n\n"  # that ends a step
    max_step_tokens: int = 256  # a step cut at this length is never accepted
    step_tokens: int | None = None  # of every step, for measurements with random weights; None: text ends steps
    hedge: bool = True  # whether the target goes on after its own step while the verifier thinks
    synchronous: bool = False  # whether to work in rounds (the paper's simpler variant)
    early: bool = True  # whether a draft step is dropped as soon as the verifier is certain to reject it
    # Whether a target with a shared draft takes the draft's tokens, and the draft writes on from the target's tokens
    # where it has no step of its own to write.
    shared_draft: bool = True
    verifier_timeout: float = 60.0  # seconds after which a verifier that does not answer turns speculation off
    draft_timeout: float = 120.0  # seconds without a token after which a draft turns speculation off
    target_timeout: float | None = None  # seconds without a token after which the target has failed; None: never


@dataclass(frozen=True)
class Regions:
    """The parts of a reply that only the target may write."""

    action_markers: tuple[str, ...] = ()  # texts that open an action region, such as a tool call
    thinking: ThinkingTags | None = None  # None for models that do not think apart; no step goes over the closing tag
    answer_from_target: bool = False  # whether only the thinking may be speculated on

    def begins_outside_thinking(self, prompt: str) -> bool:
        """Whether a reply to this prompt begins where only the target may write."""
        if self.thinking is None or not self.answer_from_target:
            return False
        return not self.thinking.opened_by(prompt)


@dataclass(frozen=True)
class ReplyRequest:
    """The prompt, and the limits of the reply. A reply with a `structured` constraint is the target's alone."""

    prompt_ids: tuple[int, ...]  # of the whole prompt, shape (n,)
    sampling: Sampling  # `max_tokens` is the budget of the reply, `stop` its stop strings
    question: str = ""  # that the reply answers, for verifiers that want to know
    regions: Regions = field(default_factory=Regions)
    draft_prompt_ids: tuple[int, ...] | None = None  # in the draft's vocabulary, if that is another than the target's


@dataclass(frozen=True)
class Reply:
    """A complete reply."""

    text: str  # without stop string and end-of-sequence
    token_ids: tuple[int, ...]  # with those of a stop string and the end-of-sequence
    finish_reason: str  # "stop" or "length"
    report: ReplyReport
    text_ends: tuple[int, ...] = ()  # length of the text after each token, a stop string included
    cut: bool = False  # whether the model had more to say: its budget was used up, or a stop string was written


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


STEP_EVENT = "lookahead_step"  # LangChain's custom events: a `StepEvent`'s fields, and the reply's call, path, policy

OnStep = Callable[[StepEvent], None]
