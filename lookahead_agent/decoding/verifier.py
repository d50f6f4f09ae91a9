"""The interface of verifiers: pairs and draft steps in, verdicts out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

from lookahead_agent.decoding.step import Step


@dataclass(frozen=True)
class StepPair:
    """A draft step and the target step that was written from the same prefix."""

    question: str
    """The text that the reply answers."""
    before: str
    """The reply up to the two steps."""
    draft: Step
    target: Step
    position: int = 0
    """The number that the step would have in the reply, from 0."""

    @property
    def same_text(self) -> bool:
        """Whether both steps have the same text, letter for letter."""
        return self.draft.text.strip() == self.target.text.strip()

    @property
    def swapped(self) -> Self:
        """The pair with the draft's step and the target's in each other's place."""
        return replace(self, draft=self.target, target=self.draft)


@dataclass(frozen=True)
class DraftStep:
    """A draft step that is judged alone, without a target step; other fields are as of a `StepPair`."""

    question: str
    before: str
    draft: Step  # in the target's tokens
    prefix_ids: tuple[int, ...]  # the target's tokens of prompt and reply up to the step, shape (n,)


@dataclass(frozen=True)
class Verdict:
    """Whether the draft step may be part of the reply."""

    accepted: bool
    reason: str
    """The deciding check, in a word or two."""
    score: float | None = None
    """The measure that was held against the threshold, if there is one."""
    judge_calls: int = 0
    """Questions to a language model that it took."""


class Verifier(Protocol):
    """Decides which draft steps are accepted, each against the target's step."""

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair; an exception turns speculation off for the request and never fails the reply."""


@runtime_checkable
class DraftVerifier(Protocol):
    """Decides which draft steps are kept without a step of the target, which then writes only what is refused."""

    async def verify_draft(self, step: DraftStep) -> Verdict:
        """Judge one draft step; see `Verifier.verify`."""


@dataclass(frozen=True)
class PartialStep:
    """A step so far."""

    token_ids: Sequence[int]  # in the target's vocabulary; none yet of an incomplete step in another one
    text: str
    complete: bool  # whether the step has ended


@runtime_checkable
class EarlyVerifier(Protocol):
    """A verifier that can rule a draft step out before the target's step is complete."""

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        """Whether the verifier is certain to reject the pair, however the steps that are not complete go on.

        It is asked after every token, in the event loop: it must be quick. It saves work and changes no result.
        """
