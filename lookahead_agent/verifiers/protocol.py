"""What a verifier is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lookahead_agent.step import Step


@dataclass(frozen=True)
class StepPair:
    """A draft step and the target step that was written from the same prefix.

    Attributes:
        question: What the reply answers.
        before: The reply up to the two steps.
        draft: The draft's step ŝ.
        target: The target's step s.
    """

    question: str
    before: str
    draft: Step
    target: Step


@dataclass(frozen=True)
class Verdict:
    """Whether the draft step may stand for the target step.

    Attributes:
        accepted: The decision.
        reason: What decided, in a word or two.
        score: The measure that was held against the threshold, if there is one.
    """

    accepted: bool
    reason: str
    score: float | None = None


class Verifier(Protocol):
    """Decides which draft steps are kept."""

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair.

        An exception turns speculation off for the request; it never fails the reply.
        """
        ...
