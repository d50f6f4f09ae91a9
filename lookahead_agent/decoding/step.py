"""A reasoning step, and what ended it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StepEnd(Enum):
    """Why a step ended."""

    DELIMITER = "delimiter"
    """The step delimiter was written."""
    ACTION = "action"
    """The marker of an action region (such as a tool call) was written."""
    THINKING = "thinking"
    """The tag that opens the model's thinking was written, outside of it."""
    EOS = "eos"
    """The model ended the reply."""
    STOP = "stop"
    """One of the request's stop strings was written."""
    LIMIT = "limit"
    """The step was cut at the step-length limit; the model had more to say."""
    BUDGET = "budget"
    """The reply's token budget (or the model's context) ran out inside the step."""

    @property
    def ends_reply(self) -> bool:
        """True if no step can follow."""
        return self in (StepEnd.EOS, StepEnd.STOP, StepEnd.BUDGET)


@dataclass(frozen=True)
class Step:
    """The tokens of one reasoning step, the ending one included.

    Attributes:
        token_ids: Tokens of the step, in the vocabulary of the engine that wrote it.
        text: Their text (end-of-sequence and other special tokens have none).
        end: What ended the step.
    """

    token_ids: tuple[int, ...]
    text: str
    end: StepEnd


def usable(draft: Step) -> bool:
    """Whether a draft step may be kept at all: not if a limit cut it, nor if an action or other region begins in it."""
    return draft.end in (StepEnd.DELIMITER, StepEnd.EOS, StepEnd.STOP)


def comparable(draft: Step, target: Step) -> bool:
    """Whether a verifier may be asked about this pair at all.

    The draft's step must be usable, and a pair of which only one side ends the reply, or only one side says anything,
    cannot stand for each other. Whether a model ends the reply or a stop string does is the same.
    """
    ends = {draft.end, target.end}
    alike = len(ends) == 1 or ends == {StepEnd.EOS, StepEnd.STOP}
    return usable(draft) and alike and bool(draft.text.strip()) == bool(target.text.strip())
