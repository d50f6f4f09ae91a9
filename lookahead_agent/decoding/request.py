"""What the decoder is asked, how it is to work, and what it answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lookahead_agent.decoding.accounting import ReplyReport
from lookahead_agent.decoding.regions import Regions
from lookahead_agent.engines.protocol import Sampling


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
        step_tokens: Tokens of every step, whatever they say: for measurements with weights that mean nothing. None:
            steps end by their text.
        hedge: Whether the target goes on after its own step while the verifier thinks.
        synchronous: Whether to work in rounds (the paper's simpler variant).
        early: Whether a draft step is dropped as soon as the verifier is certain to reject it.
        shared_draft: Whether a target that guesses tokens by what the draft writes is shown it, and the draft writes
            on from the target's words where it has no step of its own to write.
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
