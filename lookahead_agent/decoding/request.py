"""The decoder's request, settings, reply and step events."""

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
    """The settings of Lookahead Reasoning."""

    depth: int = 4  # steps in flight at the front (γ); 0 runs the target alone
    width: int = 1  # draft candidates per position (w); the first is the draft's own choice
    draft_temperature: float = 0.7  # sampling temperature of the other candidates in a greedy reply
    delimiter: str | re.Pattern[str] = "\n\n"  # text or pattern that ends a step
    max_step_tokens: int = 256  # a draft step truncated at this length is never accepted
    hedge: bool = True  # whether the target continues after its own step during verification
    synchronous: bool = False  # whether to work in rounds: the paper's synchronous variant
    early: bool = True  # whether a draft step is dropped as soon as the verifier is certain to reject it
    # Whether a target with a shared draft verifies the draft's tokens. The draft then follows the target's tokens
    # while it has no step of its own to write.
    shared_draft: bool = True
    verifier_timeout: float = 60.0  # seconds of one verdict after which speculation is disabled
    draft_timeout: float = 120.0  # seconds without a draft token after which speculation is disabled
    target_timeout: float | None = None  # seconds without a target token after which the request fails; None: never
    # The same while the target's engine gives no token to any other request either, and after more time for a long
    # prompt; see `EngineProgress`. None: never
    stall_timeout: float | None = 120.0
    # Seconds of silence of the draft or the verifier after which the target continues meanwhile, wherever it would wait
    patience: float = 2.0


@dataclass(frozen=True)
class Regions:
    """The parts of a reply that only the target may write."""

    action_markers: tuple[str, ...] = ()  # texts that open an action region, such as a tool call
    thinking: ThinkingTags | None = None  # None: the model marks no thinking; no step extends past the closing tag
    answer_from_target: bool = False  # whether step speculation is limited to the thinking


@dataclass(frozen=True)
class ReplyRequest:
    """The prompt and the limits of one reply; with a `structured` constraint, the target writes the reply alone."""

    prompt_ids: tuple[int, ...]  # token ids of the whole prompt, shape (n,)
    sampling: Sampling  # `max_tokens` is the reply's budget, `stop` its stop strings
    question: str = ""  # the question of the prompt, for verifiers that use it
    regions: Regions = field(default_factory=Regions)
    draft_prompt_ids: tuple[int, ...] | None = None  # the prompt in the draft's vocabulary, if that differs
    # Most tokens between the tags of `regions.thinking`, after which the decoder closes it; None: any number. It is at
    # least 1 if the prompt opens the thinking.
    thinking_tokens: int | None = None


@dataclass(frozen=True)
class Reply:
    """A complete reply."""

    text: str  # the reply without stop string and end-of-sequence
    token_ids: tuple[int, ...]  # all tokens, those of a stop string and the end-of-sequence included
    finish_reason: str  # "stop", "length", or another reason of the target's engine
    report: ReplyReport
    text_ends: tuple[int, ...] = ()  # length of the text after each token, a stop string included
    truncated: bool = False  # whether the budget or a stop string ended the reply, not the model's end-of-sequence


StepEventKind = Literal["drafted", "written", "judged", "accepted", "committed", "rejected", "unused", "aborted"]


@dataclass(frozen=True)
class StepEvent:
    """A state change of one step.

    Attributes:
        kind: "drafted" or "written": the draft or the target completed the step. "judged": the verifier has a verdict
            on the draft step. "accepted" or "committed": the draft or the target step is part of the reply. "rejected"
            or "unused": the draft or the target step is complete and dropped. "aborted": the step was stopped before it
            was decided.
        source: The model that writes the step: "draft" or "target".
        position: Position of the step in the reply, from 0.
        text: Text of the step so far, with the delimiter.
        started: When writing began ("judged": when verification began), in seconds since the reply began.
        ended: When it ended, in the same unit.
        verdict: The verifier's reason, in a word or two; None without a verdict.
        score: The verifier's measure that is compared with the threshold; None without one.
    """

    kind: StepEventKind
    source: Literal["draft", "target"]
    position: int
    text: str
    started: float
    ended: float
    verdict: str | None = None
    score: float | None = None


STEP_EVENT = "lookahead_step"  # LangChain custom event: a `StepEvent`'s fields, and the reply's call, path and policy

OnStep = Callable[[StepEvent], None]
