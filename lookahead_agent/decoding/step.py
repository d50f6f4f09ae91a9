"""A reasoning step, the tree of steps that may come, and what the scheduler is told of them and says."""

from dataclasses import dataclass, field
from enum import Enum


class StepEnd(Enum):
    """Why a step ended."""

    DELIMITER = "delimiter"  # the step delimiter was written
    ACTION = "action"  # the marker of an action region (such as a tool call) was written
    THINKING = "thinking"  # the tag that opens the model's thinking was written, outside of it
    EOS = "eos"  # the model ended the reply
    STOP = "stop"  # one of the request's stop strings was written
    LIMIT = "limit"  # the step was cut at the step-length limit; the model had more to say
    BUDGET = "budget"  # the reply's token budget (or the model's context) ran out inside the step

    @property
    def ends_reply(self) -> bool:
        """Whether no step can follow."""
        return self in (StepEnd.EOS, StepEnd.STOP, StepEnd.BUDGET)


@dataclass(frozen=True)
class Step:
    """The tokens of one reasoning step, the ending one included."""

    token_ids: tuple[int, ...]  # in the vocabulary of the engine that wrote it
    text: str  # without end-of-sequence and other special tokens
    end: StepEnd


def usable(draft: Step) -> bool:
    """Whether a draft step may be kept at all: not if a limit cut it, nor if an action or other region begins in it."""
    return draft.end in (StepEnd.DELIMITER, StepEnd.EOS, StepEnd.STOP)


def comparable(draft: Step, target: Step) -> bool:
    """Whether a verifier may be asked about this pair at all: a usable draft step, and both or neither with text.

    One that ends the reply and one that does not cannot replace each other; a stop string ends it as its own end does.
    """
    ends = {draft.end, target.end}
    alike = len(ends) == 1 or ends == {StepEnd.EOS, StepEnd.STOP}
    return usable(draft) and alike and bool(draft.text.strip()) == bool(target.text.strip())


class Source(Enum):
    """The model that wrote a step."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass(eq=False)
class Candidate:
    """A draft step after a node: being written, written, verified or refused."""

    rank: int  # among the node's candidates; 0 is the draft's first choice
    job: int | None = None  # that writes it, while it does
    node: "Node | None" = None  # the prefix that ends with it, once it is written
    verify_job: int | None = None  # while it runs
    accepted: bool | None = None  # the verdict, once there is one
    refused: bool = False  # whatever the verdict

    @property
    def written_by(self) -> int | None:
        """The job that writes it, or wrote it."""
        return self.node.job if self.node is not None else self.job


@dataclass(eq=False)
class Node:
    """A prefix of the reply: its parent's, and one step more."""

    position: int  # of the step after this prefix
    parent: "Node | None" = None  # the prefix without the last step; None for the empty reply and for the front
    source: Source | None = None  # of the last step
    step: Step | None = None  # the last step
    job: int = -1  # that wrote the last step
    rank: int = 0  # of the last step among the draft's candidates; 0 if the target wrote it
    target: "Node | None" = None  # the prefix with the target's next step, once it is written
    target_job: int | None = None  # that writes the target's next step, while it does
    candidates: list[Candidate] = field(default_factory=list)  # the draft's next steps
    closed: bool = False  # whether the draft is not asked (again) for the next step
    chosen: "Node | None" = None  # the prefix with the next step, once that is decided

    @property
    def open_candidates(self) -> list[Candidate]:
        """Candidates that may still be chosen."""
        return [candidate for candidate in self.candidates if not candidate.refused]

    @property
    def expected(self) -> "list[Node]":
        """The nodes of which one is expected to follow."""
        if self.chosen is not None:
            return [self.chosen]
        return [candidate.node for candidate in self.open_candidates if candidate.node is not None]

    @property
    def ends_reply(self) -> bool:
        """Whether no step can follow."""
        return self.step is not None and self.step.end.ends_reply

    @property
    def opens_action(self) -> bool:
        """Whether an action region begins here."""
        return self.step is not None and self.step.end is StepEnd.ACTION


# Events, the scheduler's input


@dataclass(frozen=True)
class StepWritten:
    """A `StartDraft` or `StartTarget` job wrote its step."""

    job: int
    step: Step


@dataclass(frozen=True)
class Judged:
    """A `Verify` job has its verdict."""

    job: int
    accepted: bool


@dataclass(frozen=True)
class Refuted:
    """The unfinished step of this `StartTarget` job rules out the draft's candidate of this rank."""

    job: int
    rank: int = 0


@dataclass(frozen=True)
class Failed:
    """A job failed; it is over."""

    job: int
    reason: str


Event = StepWritten | Judged | Refuted | Failed

# Actions, its output


@dataclass(frozen=True)
class StartDraft:
    """Have the draft write its candidate of this rank for the step that follows `node`."""

    job: int
    node: Node
    rank: int = 0


@dataclass(frozen=True)
class StartTarget:
    """Have the target write the step that follows `node`; if `live`, its tokens are certain to be committed."""

    job: int
    node: Node
    live: bool


@dataclass(frozen=True)
class Verify:
    """Ask the verifier whether `draft` may replace `target` (None: whether it may be accepted at all)."""

    job: int
    draft: Node
    target: Node | None


@dataclass(frozen=True)
class Commit:
    """The step of `node` (written by job `node.job`) is part of the reply."""

    node: Node


@dataclass(frozen=True)
class Reject:
    """The complete step of this job will not be used."""

    job: int


@dataclass(frozen=True)
class Abort:
    """Stop this running job."""

    job: int


@dataclass(frozen=True)
class Finish:
    """The reply is complete: `end` is what ended its last step."""

    end: StepEnd


@dataclass(frozen=True)
class Fail:
    """The reply cannot be completed: the target failed."""

    reason: str


Action = StartDraft | StartTarget | Verify | Commit | Reject | Abort | Finish | Fail
