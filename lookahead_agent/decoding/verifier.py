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
    """The position of the two steps in the reply, from 0."""
    cache_salt: str | None = None
    """The reply's cache salt, for each request to an engine or a server; see `Sampling`."""

    @property
    def same_text(self) -> bool:
        """Whether both steps have the same text, apart from whitespace around it."""
        return self.draft.text.strip() == self.target.text.strip()

    def swap(self) -> Self:
        """Return the pair with the draft step and the target step exchanged."""
        return replace(self, draft=self.target, target=self.draft)


@dataclass(frozen=True)
class DraftStep:
    """A draft step that is judged without a target step; the other fields are those of `StepPair`."""

    question: str
    before: str
    draft: Step  # the step in the target's tokens
    prefix_ids: tuple[int, ...]  # the target's tokens of prompt and reply up to the step, shape (n,)
    cache_salt: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The decision whether a draft step may be part of the reply."""

    accepted: bool
    reason: str
    """The deciding check, in a word or two."""
    score: float | None = None
    """The measure that is compared with the threshold, if there is one."""
    judge_calls: int = 0
    """Language model requests that the verdict took."""


class Verifier(Protocol):
    """Decides which draft steps are accepted, by comparing each with the target step."""

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair; an exception disables speculation for the reply and never fails it."""


@runtime_checkable
class DraftVerifier(Protocol):
    """Decides which draft steps are accepted without a target step; the target writes only after a rejection."""

    async def verify_draft(self, step: DraftStep) -> Verdict:
        """Judge one draft step; see `Verifier.verify`."""


@dataclass(frozen=True)
class PartialStep:
    """The part of a step that is written so far."""

    token_ids: Sequence[int]  # tokens of the target's vocabulary; empty for an incomplete step in another one
    text: str
    complete: bool  # whether the step has ended


@runtime_checkable
class EarlyVerifier(Protocol):
    """A verifier that can rule out a draft step before the target step is complete."""

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        """Whether the verifier is certain to reject the pair, however the incomplete steps continue.

        The event loop calls it after every token, so it must be fast. It saves work and changes no result.
        """
