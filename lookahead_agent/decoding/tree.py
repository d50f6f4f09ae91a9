"""The tree of steps that may come: what is committed is its root."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lookahead_agent.decoding.step import Step, StepEnd


class Source(Enum):
    """Who wrote a step."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass(eq=False)
class Candidate:
    """A draft step after a node: being written, written, judged or refused.

    Attributes:
        rank: Its number among the node's candidates; 0 is the draft's first choice.
        job: The draft job that writes it, while it does.
        node: The prefix that ends with it, once it is written.
        verify_job: The job that judges it, while it does.
        accepted: The verdict, once there is one.
        refused: Whether it is out, whatever it may say.
    """

    rank: int
    job: int | None = None
    node: Node | None = None
    verify_job: int | None = None
    accepted: bool | None = None
    refused: bool = False


@dataclass(eq=False)
class Node:
    """A prefix of the reply: its parent's, and one step more.

    Attributes:
        position: Index of the next step after this prefix.
        parent: The prefix without the last step; None for the empty reply and for the front.
        source: Who wrote the last step.
        step: The last step.
        job: The job that wrote it.
        rank: The last step's rank among the draft's candidates; 0 if the target wrote it.
        target: The prefix with the target's next step, once it is written.
        target_job: The job that writes it, while it does.
        candidates: The draft's next steps.
        closed: Whether the draft is not asked (again) for the next step.
        chosen: What follows, once that is decided.
    """

    position: int
    parent: Node | None = None
    source: Source | None = None
    step: Step | None = None
    job: int = -1
    rank: int = 0
    target: Node | None = None
    target_job: int | None = None
    candidates: list[Candidate] = field(default_factory=list)
    closed: bool = False
    chosen: Node | None = None

    @property
    def open_candidates(self) -> list[Candidate]:
        """Candidates that may still be chosen."""
        return [candidate for candidate in self.candidates if not candidate.refused]

    @property
    def expected(self) -> list[Node]:
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
