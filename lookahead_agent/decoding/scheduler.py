"""The decisions of Lookahead Reasoning (arXiv 2506.19830, section 3.1), without I/O: events in, actions out.

A *node* is a prefix of the reply, and the root is the committed prefix. Each event decides nodes, commits decided steps
in order and starts free jobs. docs/explanation/decoder.md explains these phases and the additions to the paper.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from lookahead_agent.decoding import step as steps
from lookahead_agent.decoding.step import Candidate, Node, Source, StepEnd, comparable, usable

_Phase = Literal["drafting", "writing", "judging"]  # the phase of a round in the synchronous variant


@dataclass
class LookaheadScheduler:
    """The decoding state of one reply.

    The caller runs `start()`, passes every event to `handle()`, and carries out the returned actions in order. Late
    events of aborted jobs are ignored.
    """

    depth: int
    width: int = 1
    hedge: bool = True
    synchronous: bool = False
    draft_first: bool = False
    awaits_thinking: bool = False
    front: Node = field(default_factory=lambda: Node(position=0))
    finished: bool = False
    speculation_disabled: str | None = None  # the failure that disabled speculation
    disabled_by: int | None = None  # the job that failed, or was late

    def __post_init__(self) -> None:
        self._speculating = self.depth > 0 and not self.awaits_thinking
        self._next_job = 0
        self._phase: _Phase = "drafting"
        # Each job has the node whose next step it writes or verifies, and the candidate (None: the target's step).
        self._jobs: dict[int, tuple[Node, Candidate | None]] = {}
        self._late: dict[int, str] = {}  # late jobs, with the reason

    def start(self) -> list[steps.Action]:
        """Return the first actions."""
        return self._advance([])

    def handle(self, event: steps.Event) -> list[steps.Action]:
        """Update the state with one event and return the actions that follow."""
        if self.finished or event.job not in self._jobs:
            return []
        actions: list[steps.Action] = []
        if isinstance(event, steps.Refuted):
            node, _ = self._jobs[event.job]
            for refuted in [other for other in node.candidates if other.rank == event.rank]:
                self._reject(node, refuted, actions)
            return self._advance(actions)
        if isinstance(event, steps.Late):
            self._late[event.job] = event.reason
            return self._advance(actions)
        node, candidate = self._jobs.pop(event.job)
        match event:
            case steps.StepWritten(number, step) if candidate is None:
                node.target_job = None
                node.target = Node(node.position + 1, node, Source.TARGET, step, number)
            case steps.StepWritten(number, step) if candidate is not None and candidate.node is None:
                siblings = [other.node.step for other in node.candidates if other.node is not None]
                candidate.node = Node(node.position + 1, node, Source.DRAFT, step, number, candidate.rank)
                # Without a target step to compare, an empty draft step has nothing to judge.
                empty = self.draft_first and not step.text.strip()
                # A candidate with the tokens of another one gains nothing.
                duplicate = any(other is not None and other.token_ids == step.token_ids for other in siblings)
                if not usable(step) or empty or duplicate:
                    self._reject(node, candidate, actions)
            case steps.Judged(_, accepted) if candidate is not None and candidate.node is not None:
                candidate.verify_job = None
                candidate.accepted = accepted
            case steps.Failed(_, reason) if candidate is None:
                self.finished = True
                return [*(steps.Abort(other) for other in self._jobs), steps.Fail(reason)]
            case steps.Failed(number, reason):
                self._disable_speculation(number, reason, actions)
            case _:
                raise ValueError(f"{event} does not fit its job")
        return self._advance(actions)

    def nodes(self) -> Iterator[Node]:
        """Yield the front and the nodes expected within `depth` steps, nearest first; rank r adds r to the distance."""
        order = 0
        heap = [(0, order, self.front)]
        while heap:
            cost, _, node = heapq.heappop(heap)
            yield node
            if node.position - self.front.position + 1 >= self.depth or not self._speculating:
                continue
            for child in _followers(node):
                if not child.ends_reply and not child.opens_action:
                    order += 1
                    heapq.heappush(heap, (cost + 1 + child.rank, order, child))

    def _disable_speculation(self, job: int, reason: str, actions: list[steps.Action]) -> None:
        """Let only the target write from the front on, because of a job of the draft or the verifier."""
        self._speculating, self.speculation_disabled, self.disabled_by = False, reason, job
        self.front.closed = True
        for candidate in list(self.front.candidates):
            self._reject(self.front, candidate, actions)

    def _advance(self, actions: list[steps.Action]) -> list[steps.Action]:
        self._proceed(actions)
        if not self.finished and self._write_beside_late_jobs(actions):
            self._proceed(actions)
        return actions

    def _write_beside_late_jobs(self, actions: list[steps.Action]) -> bool:
        """Let the target continue its own steps while a job is late; True if they complete the reply."""
        self._late = {job: reason for job, reason in self._late.items() if job in self._jobs}
        if not self._late:
            return False
        node = self.front
        while node.target is not None and not node.target.ends_reply:
            node = node.target
        if node.target is None:
            self._start_target(node, actions)
            return False
        self._disable_speculation(*next(iter(self._late.items())), actions)
        return True

    def _proceed(self, actions: list[steps.Action]) -> None:
        if self._in_rounds and not self._round(actions):
            return
        self._decide(self.front, actions)
        while not self.finished and self.front.chosen is not None:
            self._commit(self.front.chosen, actions)
        if self.finished:
            return
        if self._in_rounds:
            self._round(actions)
        else:
            self._fill(actions)

    def _decide(self, node: Node, actions: list[steps.Action]) -> None:
        if node.chosen is None:
            accepted = next((candidate.node for candidate in node.candidates if candidate.accepted), None)
            if accepted is not None:
                self._choose(node, accepted, actions)
            else:
                self._reject_hopeless(node, actions)
                if node.target is not None and not node.candidates:
                    self._choose(node, node.target, actions)
        for child in _followers(node):
            self._decide(child, actions)

    def _reject_hopeless(self, node: Node, actions: list[steps.Action]) -> None:
        target = node.target.step if node.target is not None else None
        for candidate in list(node.candidates):
            draft = candidate.node.step if candidate.node is not None else None
            hopeless = target is not None and (draft is None or not comparable(draft, target))
            if hopeless or candidate.accepted is False:
                self._reject(node, candidate, actions)

    def _choose(self, node: Node, chosen: Node, actions: list[steps.Action]) -> None:
        node.chosen = chosen
        self._abort(node.target_job, actions)
        if node.target is not None and node.target is not chosen:
            self._drop(node.target, actions)
        for candidate in list(node.candidates):
            if candidate.node is chosen:
                self._abort(candidate.verify_job, actions)
            else:
                self._reject(node, candidate, actions)
        node.target = node.target_job = None
        node.candidates = []

    def _commit(self, node: Node, actions: list[steps.Action]) -> None:
        assert node.step is not None
        actions.append(steps.Commit(node))
        self.front = node
        node.parent = None
        if node.ends_reply:
            self.finished = True
            self._drop_below(node, actions)
            actions.append(steps.Finish(node.step.end))
        elif node.opens_action:
            self._speculating = self.awaits_thinking = False
        elif node.step.end is StepEnd.THINKING and self.awaits_thinking:
            self.awaits_thinking = False
            self._speculating = self.depth > 0

    def _fill(self, actions: list[steps.Action]) -> None:
        undecided = 0
        for node in list(self.nodes()):
            if node.chosen is not None:
                continue
            undecided += 1
            if undecided > max(1, self.depth * self.width):
                break
            if self._speculating:
                self._start_drafts(node, actions)
            if not self.draft_first or not node.candidates:
                self._start_target(node, actions)
            if self._speculating:
                self._start_verifiers(node, actions)
        target = self.front.target
        if self.hedge and target is not None and not target.ends_reply:
            self._start_target(target, actions)

    def _start_target(self, node: Node, actions: list[steps.Action]) -> None:
        if node.target is None and node.target_job is None:
            node.target_job = self._start(node)
            actions.append(steps.StartTarget(node.target_job, node, live=not self._speculating))

    def _start_drafts(self, node: Node, actions: list[steps.Action]) -> None:
        if node.closed:
            return
        node.closed = True
        for rank in range(self.width):
            candidate = Candidate(rank)
            candidate.job = self._start(node, candidate)
            node.candidates.append(candidate)
            actions.append(steps.StartDraft(candidate.job, node, rank))

    def _start_verifiers(self, node: Node, actions: list[steps.Action]) -> None:
        if node.target is None and not self.draft_first:
            return
        for candidate in node.candidates:
            if candidate.node is not None and candidate.accepted is None and candidate.verify_job is None:
                candidate.verify_job = self._start(node, candidate)
                actions.append(steps.Verify(candidate.verify_job, candidate.node, node.target))

    @property
    def _in_rounds(self) -> bool:
        return self.synchronous and self._speculating

    def _round(self, actions: list[steps.Action]) -> bool:
        """Advance the round of the synchronous variant; True once all its steps are written and judged."""
        nodes = [node for node in self.nodes() if node.chosen is None][: self.depth * self.width]
        if self._phase == "drafting":
            for node in nodes:
                # No target step follows the last draft step, so both models write in parallel there.
                if node.position - self.front.position + 1 < self.depth:
                    self._start_drafts(node, actions)
            if self._jobs:
                return False
            self._phase = "writing"
            for node in nodes:
                self._start_drafts(node, actions)
                self._start_target(node, actions)
        if self._jobs:
            return False
        if self._phase == "writing":
            self._phase = "judging"
            for node in nodes:
                self._reject_hopeless(node, actions)
                self._start_verifiers(node, actions)
        if self._jobs:
            return False
        self._phase = "drafting"
        return True

    # Rejections and aborts

    def _reject(self, node: Node, candidate: Candidate, actions: list[steps.Action]) -> None:
        """Reject a candidate for good: abort its jobs, and drop its step with everything written after it."""
        node.candidates.remove(candidate)
        self._abort(candidate.job, actions)
        self._abort(candidate.verify_job, actions)
        if candidate.node is not None:
            self._drop(candidate.node, actions)

    def _drop(self, node: Node, actions: list[steps.Action]) -> None:
        actions.append(steps.Reject(node.job))
        self._drop_below(node, actions)

    def _drop_below(self, node: Node, actions: list[steps.Action]) -> None:
        self._abort(node.target_job, actions)
        for candidate in list(node.candidates):
            self._reject(node, candidate, actions)
        for child in (node.target, node.chosen):
            if child is not None:
                self._drop(child, actions)
        node.target = node.target_job = node.chosen = None

    def _start(self, node: Node, candidate: Candidate | None = None) -> int:
        self._next_job += 1
        self._jobs[self._next_job] = node, candidate
        return self._next_job

    def _abort(self, number: int | None, actions: list[steps.Action]) -> None:
        if number is not None and self._jobs.pop(number, None) is not None:
            actions.append(steps.Abort(number))


def _followers(node: Node) -> list[Node]:
    """The nodes that may follow: the chosen one, else the candidates that are written."""
    if node.chosen is not None:
        return [node.chosen]
    return [candidate.node for candidate in node.candidates if candidate.node is not None]
