"""A reasoning step, the tree of possible steps, and the scheduler's events and actions."""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from lookahead_agent.decoding.thinking import ThinkingBudget


class StepEnd(Enum):
    """Why a step ended."""

    DELIMITER = "delimiter"  # the step delimiter was written
    ACTION = "action"  # the marker of an action region (such as a tool call) was written
    THINKING = "thinking"  # the tag that opens the thinking was written, outside the thinking
    EOS = "eos"  # the model ended the reply
    STOP = "stop"  # one of the request's stop strings was written
    LIMIT = "limit"  # the limit of steps truncated it, or a draft's step used up the budget of the thinking
    BUDGET = "budget"  # the reply's token budget (or the model's context) ran out inside the step

    @property
    def ends_reply(self) -> bool:
        """Whether the reply ends with this step."""
        return self in (StepEnd.EOS, StepEnd.STOP, StepEnd.BUDGET)


@dataclass(frozen=True)
class Step:
    """One reasoning step, with the tokens that end it."""

    token_ids: tuple[int, ...]  # tokens in the vocabulary of the engine that wrote the step
    text: str  # the step without end-of-sequence and other special tokens
    end: StepEnd
    thinking: ThinkingBudget | None = None  # what is left of the thinking's budget after the step; None: no budget
    # Tokens at the end that close the thinking where its budget is used up: no engine generated them.
    closing_tokens: int = 0


def usable(draft: Step) -> bool:
    """Whether a draft step may be accepted at all: no limit truncated it, and no action or thinking begins in it."""
    return draft.end in (StepEnd.DELIMITER, StepEnd.EOS, StepEnd.STOP)


def comparable(draft: Step, target: Step) -> bool:
    """Whether a verifier may judge this pair: the draft step is usable, and both or neither have text.

    Both steps must end alike; EOS and a stop string count as the same end.
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
    """A draft step after a node: being written, written, or being verified."""

    rank: int  # rank among the node's candidates; 0 is the draft's first choice
    job: int = 0  # job that is writing it or has written it
    node: "Node | None" = None  # the prefix that ends with it, once it is written
    verify_job: int | None = None  # job that is verifying it, while it runs
    accepted: bool | None = None  # the verdict; None before it


@dataclass(eq=False)
class Node:
    """A prefix of the reply: the parent's prefix and one more step."""

    position: int  # position of the step after this prefix, from 0
    parent: "Node | None" = None  # the prefix without the last step; None for the empty reply and for the front
    source: Source | None = None  # model that wrote the last step
    step: Step | None = None  # the last step
    job: int = -1  # job that wrote the last step
    rank: int = 0  # rank of the last step among the draft's candidates; 0 for a target step
    target: "Node | None" = None  # the prefix with the target's next step, once it is written
    target_job: int | None = None  # job that is writing the target's next step, while it runs
    candidates: list[Candidate] = field(default_factory=list)  # the draft's for the next step that are not rejected
    closed: bool = False  # whether the draft may not start the next step, or has started it
    chosen: "Node | None" = None  # the prefix with the next step, once the step is decided

    @cached_property
    def ends_reply(self) -> bool:
        """Whether the last step ends the reply."""
        return self.step is not None and self.step.end.ends_reply

    @cached_property
    def opens_action(self) -> bool:
        """Whether the last step opens an action region."""
        return self.step is not None and self.step.end is StepEnd.ACTION


# Events, the scheduler's input


@dataclass(frozen=True)
class StepWritten:
    """A `StartDraft` or `StartTarget` job has written its step."""

    job: int
    step: Step


@dataclass(frozen=True)
class Judged:
    """A `Verify` job has its verdict."""

    job: int
    accepted: bool


@dataclass(frozen=True)
class Refuted:
    """The target's unfinished step, of this `StartTarget` job, rules out the draft candidate of this rank."""

    job: int
    rank: int = 0


@dataclass(frozen=True)
class Failed:
    """A job has failed and ended."""

    job: int
    reason: str


@dataclass(frozen=True)
class Late:
    """A draft or verification job has given nothing for so long that the target continues meanwhile."""

    job: int
    reason: str


Event = StepWritten | Judged | Refuted | Failed | Late

# Actions, the scheduler's output


@dataclass(frozen=True)
class StartDraft:
    """Let the draft write its candidate of this rank for the step after `node`."""

    job: int
    node: Node
    rank: int = 0


@dataclass(frozen=True)
class StartTarget:
    """Let the target write the step after `node`; if `live`, its tokens are certain to be committed."""

    job: int
    node: Node
    live: bool


@dataclass(frozen=True)
class Verify:
    """Ask the verifier whether `draft` may replace `target`; None: whether it is accepted without a target step."""

    job: int
    draft: Node
    target: Node | None


@dataclass(frozen=True)
class Commit:
    """Add the step of `node` (written by job `node.job`) to the reply."""

    node: Node


@dataclass(frozen=True)
class Reject:
    """Drop the complete step of this job."""

    job: int


@dataclass(frozen=True)
class Abort:
    """Stop this running job."""

    job: int


@dataclass(frozen=True)
class Finish:
    """The reply is complete; `end` is the end of its last step."""

    end: StepEnd


@dataclass(frozen=True)
class Fail:
    """The reply cannot be completed: the target failed."""

    reason: str


Action = StartDraft | StartTarget | Verify | Commit | Reject | Abort | Finish | Fail
