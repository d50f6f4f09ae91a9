"""The decisions, under every order of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_agent.decoding.scheduler import LookaheadScheduler
from lookahead_agent.decoding.step import (
    Abort,
    Action,
    Commit,
    Event,
    Fail,
    Failed,
    Finish,
    Judged,
    Node,
    Refuted,
    Reject,
    Source,
    StartDraft,
    StartTarget,
    Step,
    StepEnd,
    StepWritten,
    Verify,
)

Text = tuple[str, ...]


def step(text: str, end: StepEnd) -> Step:
    return Step(tuple(ord(letter) for letter in text), text, end)


def prefix(node: Node) -> Text:
    """Texts from the front to the node; what is committed is kept by the world."""
    texts: list[str] = []
    walk: Node | None = node
    while walk is not None and walk.step is not None and walk.parent is not None:
        texts.append(walk.step.text)
        walk = walk.parent
    return tuple(reversed(texts))


@dataclass
class World:
    """Models that answer by a function of the prefix, and every rule that the machine must keep."""

    target: Callable[[Text], Step]
    draft: Callable[[Text, int], Step]
    accepts: Callable[[Step, Step], bool]
    depth: int
    width: int = 1
    early: bool = False
    running: dict[int, tuple[str, Node, Event]] = field(default_factory=dict)
    ended_as: dict[int, str] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    committed: list[Node] = field(default_factory=list)
    ended: Action | None = None

    def text_before(self, node: Node) -> Text:
        own = prefix(node)
        committed = tuple(n.step.text for n in self.committed if n.step is not None)
        return committed + own

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.ended is None, "nothing follows the end"
            match action:
                case StartDraft(job, node, rank):
                    drafts = [other for kind, other, _ in self.running.values() if kind == "draft"]
                    assert drafts.count(node) < self.width
                    assert len(drafts) < self.width or self.width > 1, "one draft at a time"
                    self._start(job, "draft", node, StepWritten(job, self.draft(self.text_before(node), rank)))
                case StartTarget(job, node, _):
                    self._start(job, "target", node, StepWritten(job, self.target(self.text_before(node))))
                case Verify(job, draft, target):
                    assert draft.step is not None
                    assert draft.parent is not None
                    assert draft.source is Source.DRAFT
                    assert draft.step.end in (StepEnd.DELIMITER, StepEnd.EOS, StepEnd.STOP)
                    beside = target.step if target is not None else self.target(self.text_before(draft.parent))
                    assert beside is not None
                    if target is not None:
                        assert target.source is Source.TARGET
                        assert draft.parent is target.parent, "a pair is written from one prefix"
                        assert draft.step.end is beside.end
                    self._start(job, "verify", draft, Judged(job, self.accepts(draft.step, beside)))
                case Commit(node):
                    self._end(node.job, "committed")
                    self.committed.append(node)
                case Reject(job):
                    assert job not in self.running
                    self._end(job, "rejected")
                case Abort(job):
                    del self.running[job]
                    self._end(job, "aborted")
                case Finish() | Fail():
                    self.ended = action
        targets = sum(kind == "target" for kind, _, _ in self.running.values())
        assert targets <= max(1, self.depth * self.width) + 1, "depth times width, and one hedge"

    def _start(self, job: int, kind: str, node: Node, event: Event) -> None:
        assert job not in self.started
        self.started.add(job)
        self.running[job] = (kind, node, event)

    def _end(self, job: int, outcome: str) -> None:
        assert job in self.started
        assert job not in self.ended_as, "a job ends once"
        self.ended_as[job] = outcome

    def refutable(self) -> list[tuple[int, int]]:
        """Running target jobs, with the ranks whose candidates the verifier would not let stand for their steps."""
        if not self.early:
            return []
        return [
            (job, candidate.rank)
            for job, (kind, node, event) in self.running.items()
            if kind == "target" and isinstance(event, StepWritten)
            for candidate in node.open_candidates
            if not self.accepts(self.draft(self.text_before(node), candidate.rank), event.step)
        ]

    def reply(self) -> Text:
        return tuple(node.step.text for node in self.committed if node.step is not None)


def model(letters: str, length: int, salt: int) -> Callable[[Text], Step]:
    """A deterministic model: its step depends on everything before."""

    def write(before: Text) -> Step:
        value = hash((before, salt)) & 0xFFFF
        end = StepEnd.EOS if len(before) >= length else StepEnd.DELIMITER
        if value % 11 == 3:
            end = StepEnd.LIMIT
        elif value % 13 == 5:
            end = StepEnd.EOS
        elif value % 17 == 7:
            end = StepEnd.ACTION
        return step(letters[value % len(letters)], end)

    return write


def candidates(first: Callable[[Text], Step], others: Callable[[Text], Step]) -> Callable[[Text, int], Step]:
    return lambda before, rank: first(before) if rank == 0 else others((*before, str(rank)))


def alone(target: Callable[[Text], Step]) -> Text:
    texts: Text = ()
    while True:
        written = target(texts)
        texts += (written.text,)
        if written.end.ends_reply:
            return texts


def play(world: World, scheduler: LookaheadScheduler, choose: Callable[[int], int], failures: set[str]) -> None:
    world.carry_out(scheduler.start())
    stale: list[Event] = []
    for _ in range(5000):
        if world.ended is not None:
            break
        if refutable := world.refutable():
            world.carry_out(scheduler.handle(Refuted(*refutable[choose(len(refutable))])))
        jobs = sorted(world.running)
        job = jobs[choose(len(jobs))]
        kind, _, event = world.running.pop(job)
        if kind in failures:
            failures.discard(kind)
            event = Failed(job, f"{kind} failed")
        if kind == "verify":
            world.ended_as[job] = "judged"
        if isinstance(event, Failed):
            world.ended_as[job] = "failed"
        stale.append(event)
        world.carry_out(scheduler.handle(event))
        world.carry_out(scheduler.handle(stale[choose(len(stale))]))  # an event that comes twice changes nothing
    assert world.ended is not None, "it comes to an end"
    assert not world.running, "nothing runs on after the end"


verdicts = st.sampled_from(["equal", "all", "none", "odd"])


def verdict(name: str) -> Callable[[Step, Step], bool]:
    return {
        "equal": lambda a, b: a.token_ids == b.token_ids,
        "all": lambda a, b: True,
        "none": lambda a, b: False,
        "odd": lambda a, b: hash((a.text, b.text)) % 2 == 1,
    }[name]


EVERYTHING: dict[str, Any] = {
    "depth": st.integers(0, 8),
    "hedge": st.booleans(),
    "mode": st.sampled_from(["asynchronous", "synchronous", "draft first"]),
    "width": st.integers(1, 3),
    "early": st.booleans(),
    "salts": st.tuples(st.integers(0, 500), st.integers(0, 500), st.booleans()),
    "length": st.integers(0, 9),
    "how": verdicts,
    "failing": st.sets(st.sampled_from(["draft", "verify"])),
    "data": st.data(),
}


def hold_guarantees(
    depth: int,
    hedge: bool,
    mode: str,
    width: int,
    early: bool,
    salts: tuple[int, int, bool],
    length: int,
    how: str,
    failing: set[str],
    data: st.DataObject,
) -> None:
    target = model("ab", length, salts[0])
    draft = candidates(target if salts[2] else model("ab", length, salts[1]), model("ab", length, salts[1] + 1))
    world = World(target, draft, verdict(how), depth, width, early)
    scheduler = LookaheadScheduler(depth, width, hedge, mode == "synchronous", mode == "draft first")
    random = data.draw(st.randoms(use_true_random=False))
    play(world, scheduler, random.randrange, set(failing))

    assert isinstance(world.ended, Finish)
    assert set(world.ended_as) == world.started, "every job ends"
    # With the draft first, an equal step is only equal in tokens: its end may be another.
    if how == "none" or (how == "equal" and mode != "draft first"):
        assert world.reply() == alone(target), "the target's own reply, whatever the order"
    last = world.committed[-1].step
    assert last is not None
    assert last.end is world.ended.end
    action_open = False
    for node in world.committed:
        assert node.step is not None
        if node.source is Source.DRAFT:
            assert node.step.end not in (StepEnd.LIMIT, StepEnd.BUDGET, StepEnd.ACTION)
            assert not action_open, "an action is the target's alone"
            assert depth > 0
        action_open = action_open or node.step.end is StepEnd.ACTION


@given(**EVERYTHING)
@settings(max_examples=3000)
def test_guarantees_hold_in_every_order_of_events(**case: Any) -> None:
    hold_guarantees(**case)


@given(depth=st.integers(0, 4), salt=st.integers(0, 500), data=st.data())
@settings(max_examples=200)
def test_a_failed_target_ends_it(depth: int, salt: int, data: st.DataObject) -> None:
    target = model("ab", 5, salt)
    world = World(target, candidates(target, target), verdict("all"), depth)
    random = data.draw(st.randoms(use_true_random=False))
    play(world, LookaheadScheduler(depth), random.randrange, {"target"})
    assert isinstance(world.ended, Fail)


def test_an_event_of_the_wrong_kind_is_refused() -> None:
    scheduler = LookaheadScheduler(depth=2)
    job = next(action.job for action in scheduler.start() if isinstance(action, StartTarget))
    with pytest.raises(ValueError, match="does not fit"):
        scheduler.handle(Judged(job, True))
