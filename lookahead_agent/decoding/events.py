"""The scheduler's input, events, and its output, actions."""

from __future__ import annotations

from dataclasses import dataclass

from lookahead_agent.decoding.step import Node, Step, StepEnd


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
