"""The decisions of Lookahead Reasoning, without I/O: events in, actions out.

The paper's algorithm (arXiv 2506.19830, section 3.1) seen as a path through a small tree. A *node* is a prefix of the
reply: the root is what is committed (the front), and from each node the draft may write one step and the target
another. The machine walks from the front along what it believes will be committed:

- **decide**: a node is decided for the draft's step if the verifier accepted it, and for the target's if the verifier
  refused it, if the two cannot be compared, or if the target was done before the draft was (waiting gains nothing
  then: nothing was written after the draft's step). Later nodes may be decided before the front is; what was written
  after the loser is dropped at once.
- **commit**: decided steps are committed in order, and the front moves.
- **fill**: along the path, up to `depth` steps from the front, a draft and a target step are started where there is
  none, and a verifier for each pair that is complete.

One thing is added to the paper: while the verifier thinks about the front, the target goes on after its own step, so
that a refusal costs no time ("hedge").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from lookahead_agent.step import Step, StepEnd, comparable


class Source(Enum):
    """Who wrote a step."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass(eq=False)
class Node:
    """A prefix of the reply: its parent's, and one step more.

    Attributes:
        position: Index of the next step after this prefix.
        parent: The prefix without the last step; None for the empty reply.
        source: Who wrote the last step.
        step: The last step.
        job: The job that wrote it.
    """

    position: int
    parent: Node | None = None
    source: Source | None = None
    step: Step | None = None
    job: int = -1
    draft: Node | None = None
    target: Node | None = None
    draft_job: int | None = None
    target_job: int | None = None
    verify_job: int | None = None
    accepted: bool | None = None
    draft_refused: bool = False
    chosen: Node | None = None

    @property
    def next(self) -> Node | None:
        """The node that is expected to follow."""
        return self.chosen or self.draft

    @property
    def ends_reply(self) -> bool:
        """Whether no step can follow."""
        return self.step is not None and self.step.end.ends_reply

    @property
    def opens_action(self) -> bool:
        """Whether an action region begins here."""
        return self.step is not None and self.step.end is StepEnd.ACTION


# Events


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
    """What this running `StartTarget` job has written so far already rules the draft's step out."""

    job: int


@dataclass(frozen=True)
class Failed:
    """A job failed; it is over."""

    job: int
    reason: str


Event = StepWritten | Judged | Refuted | Failed

# Actions


@dataclass(frozen=True)
class StartDraft:
    """Have the draft write the step that follows `node`."""

    job: int
    node: Node


@dataclass(frozen=True)
class StartTarget:
    """Have the target write the step that follows `node`; if `live`, its tokens are certain to be committed."""

    job: int
    node: Node
    live: bool


@dataclass(frozen=True)
class Verify:
    """Ask the verifier whether `draft` may stand for `target`."""

    job: int
    draft: Node
    target: Node


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


class _Kind(Enum):
    DRAFT = "draft"
    TARGET = "target"
    VERIFIER = "verifier"


@dataclass
class LookaheadMachine:
    """The state of one reply.

    Args:
        depth: Steps in flight at the front, γ ≥ 1; 0 for the target alone.
        hedge: Whether the target goes on after its own step while the verifier thinks.
        synchronous: Whether to work in rounds: γ draft steps, then all target steps at once, then all verdicts. The
            paper's simpler variant, for study and comparison; `hedge` means nothing to it.

    Feed `start()` and then every event to `handle()`, and carry out the returned actions in their order. Events of
    jobs that were aborted meanwhile may still be fed; they are ignored.
    """

    depth: int
    hedge: bool = True
    synchronous: bool = False
    front: Node = field(default_factory=lambda: Node(position=0))
    finished: bool = False
    speculation_off: str | None = None
    """Why speculation was turned off before the end: a failure's reason, None if it was not."""

    def __post_init__(self) -> None:
        self._speculating = self.depth > 0
        self._next_job = 0
        self._round_drafted = False
        self._jobs: dict[int, tuple[_Kind, Node]] = {}

    def start(self) -> list[Action]:
        """The first actions."""
        return self._advance([])

    def handle(self, event: Event) -> list[Action]:
        """Take one event into account and return what is to be done."""
        if self.finished or event.job not in self._jobs:
            return []
        if isinstance(event, Refuted):
            actions: list[Action] = []
            self._refuse_draft(self._jobs[event.job][1], actions)
            return self._advance(actions)
        kind, node = self._jobs.pop(event.job)
        match event, kind:
            case StepWritten(job, step), _Kind.DRAFT:
                node.draft_job = None
                node.draft = Node(node.position + 1, node, Source.DRAFT, step, job)
            case StepWritten(job, step), _Kind.TARGET:
                node.target_job = None
                node.target = Node(node.position + 1, node, Source.TARGET, step, job)
            case Judged(_, accepted), _Kind.VERIFIER:
                node.verify_job = None
                node.accepted = accepted
            case Failed(_, reason), _Kind.TARGET:
                self.finished = True
                return [*(Abort(job) for job in self._jobs), Fail(reason)]
            case Failed(_, reason), _:
                return self._advance(self._stop_speculating(reason))
            case _:
                raise ValueError(f"{event} does not fit a {kind.value} job")
        return self._advance([])

    def path(self) -> Iterator[Node]:
        """The front and the nodes that are expected to follow it."""
        node: Node | None = self.front
        while node is not None:
            yield node
            node = node.next

    def _advance(self, actions: list[Action]) -> list[Action]:
        if self.synchronous and self._speculating and not self._round(actions):
            return actions
        for node in self.path():
            self._decide(node, actions)
        while not self.finished and self.front.chosen is not None:
            self._commit(self.front.chosen, actions)
        if self.finished:
            return actions
        if self.synchronous and self._speculating:
            self._round_drafted = False
            self._round(actions)
        else:
            self._fill(actions)
        return actions

    def _round(self, actions: list[Action]) -> bool:
        """Go on with a synchronous round; True once everything in it is written and judged."""
        for node in list(self.path()):
            self._drop_unusable(node, actions)
        nodes = list(self.path())
        tip = nodes[-1]
        drafting = len(nodes) <= self.depth and not tip.ends_reply and not tip.draft_refused
        if drafting and tip.draft_job is None and (len(nodes) < self.depth or not self._round_drafted):
            tip.draft_job = self._start(_Kind.DRAFT, tip)
            actions.append(StartDraft(tip.draft_job, tip))
        if not self._round_drafted:
            if drafting and len(nodes) < self.depth:
                return False
            # The last draft step is only compared, so it is written beside the target's.
            self._round_drafted = True
            for node in nodes[: self.depth]:
                if not node.ends_reply:
                    node.target_job = self._start(_Kind.TARGET, node)
                    actions.append(StartTarget(node.target_job, node, live=False))
        if self._jobs:
            return False
        for node in nodes:
            draft, target = node.draft, node.target
            if draft is not None and target is not None and node.accepted is None and _comparable(draft, target):
                node.verify_job = self._start(_Kind.VERIFIER, node)
                actions.append(Verify(node.verify_job, draft, target))
        return not self._jobs

    def _drop_unusable(self, node: Node, actions: list[Action]) -> None:
        if node.draft is not None and not _usable(node.draft):
            self._refuse_draft(node, actions)

    def _decide(self, node: Node, actions: list[Action]) -> None:
        self._drop_unusable(node, actions)
        draft, target = node.draft, node.target
        if node.chosen is not None or target is None:
            return
        if draft is None or not _comparable(draft, target) or node.accepted is False:
            node.chosen = target
            self._abort(node.draft_job, actions)
            if draft is not None:
                self._drop(draft, actions)
        elif node.accepted:
            node.chosen = draft
            self._drop(target, actions)
        if node.chosen is not None:
            self._abort(node.verify_job, actions)
            node.draft_job = node.verify_job = node.draft = node.target = None

    def _commit(self, node: Node, actions: list[Action]) -> None:
        actions.append(Commit(node))
        self.front = node
        node.parent = None
        if node.ends_reply:
            assert node.step is not None
            self.finished = True
            self._drop_below(node, actions)
            actions.append(Finish(node.step.end))
        elif node.opens_action:
            self._speculating = False

    def _fill(self, actions: list[Action]) -> None:
        for node in list(self.path()):
            ahead = node.position - self.front.position
            if node.ends_reply or ahead >= max(1, self.depth) or (ahead and node.opens_action):
                break
            if node.chosen is not None:
                continue
            if node.target is None and node.target_job is None:
                node.target_job = self._start(_Kind.TARGET, node)
                actions.append(StartTarget(node.target_job, node, live=not self._speculating))
            if not self._speculating:
                break
            if node.draft is None and node.draft_job is None and not node.draft_refused:
                node.draft_job = self._start(_Kind.DRAFT, node)
                actions.append(StartDraft(node.draft_job, node))
            if node.draft is not None and node.target is not None and node.verify_job is None:
                node.verify_job = self._start(_Kind.VERIFIER, node)
                actions.append(Verify(node.verify_job, node.draft, node.target))
        own = self.front.target
        if not self.hedge or own is None or own.ends_reply:
            return
        if own.target is None and own.target_job is None:
            own.target_job = self._start(_Kind.TARGET, own)
            actions.append(StartTarget(own.target_job, own, live=False))

    def _refuse_draft(self, node: Node, actions: list[Action]) -> None:
        """Drop what the draft writes or wrote after a node, for good: the step there will be the target's."""
        self._abort(node.draft_job, actions)
        if node.draft is not None:
            self._drop(node.draft, actions)
        node.draft = node.draft_job = None
        node.draft_refused = True

    def _stop_speculating(self, reason: str) -> list[Action]:
        """Forget everything but the target's own steps from the front."""
        self._speculating = False
        self.speculation_off = reason
        actions: list[Action] = []
        for node in list(self.path()):
            if node.chosen is not None:
                continue
            self._abort(node.verify_job, actions)
            node.verify_job = None
            self._refuse_draft(node, actions)
            break
        return actions

    def _start(self, kind: _Kind, node: Node) -> int:
        self._next_job += 1
        self._jobs[self._next_job] = (kind, node)
        return self._next_job

    def _abort(self, job: int | None, actions: list[Action]) -> None:
        if job is not None and self._jobs.pop(job, None) is not None:
            actions.append(Abort(job))

    def _drop(self, node: Node, actions: list[Action]) -> None:
        actions.append(Reject(node.job))
        self._drop_below(node, actions)

    def _drop_below(self, node: Node, actions: list[Action]) -> None:
        for job in (node.draft_job, node.target_job, node.verify_job):
            self._abort(job, actions)
        for child in {id(n): n for n in (node.draft, node.target, node.chosen) if n is not None}.values():
            self._drop(child, actions)


def _usable(draft: Node) -> bool:
    assert draft.step is not None
    return comparable(draft.step, draft.step)


def _comparable(draft: Node, target: Node) -> bool:
    assert draft.step is not None
    assert target.step is not None
    return comparable(draft.step, target.step)
