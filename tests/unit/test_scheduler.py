"""Guarantees of the scheduler under every order of events."""

from __future__ import annotations

import zlib
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
    Late,
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
    """Texts of the steps after the front, up to the node; `Simulation` keeps the committed ones."""
    texts: list[str] = []
    current: Node | None = node
    while current is not None and current.step is not None and current.parent is not None:
        texts.append(current.step.text)
        current = current.parent
    return tuple(reversed(texts))


@dataclass
class Simulation:
    """Models whose steps are functions of the prefix, and all invariants of the scheduler as assertions."""

    target: Callable[[Text], Step]
    draft: Callable[[Text, int], Step]
    accepts: Callable[[Step, Step], bool]
    depth: int
    width: int = 1
    early: bool = False
    late: bool = False
    in_rounds: bool = False
    running: dict[int, tuple[str, Node, Event]] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    committed: list[Node] = field(default_factory=list)
    last_action: Action | None = None

    def text_before(self, node: Node) -> Text:
        own = prefix(node)
        committed = tuple(n.step.text for n in self.committed if n.step is not None)
        return committed + own

    def execute(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.last_action is None, "no action follows the end of the reply"
            match action:
                case StartDraft(job, node, rank):
                    drafts = [other for kind, other, _ in self.running.values() if kind == "draft"]
                    assert drafts.count(node) < self.width
                    assert len(drafts) < self.width or self.width > 1, "one draft at a time"
                    self._start(job, "draft", node, StepWritten(job, self.draft(self.text_before(node), rank)))
                case StartTarget(job, node, _):
                    self._start(job, "target", node, StepWritten(job, self.target(self.text_before(node))))
                case Verify(job, draft, target):
                    kinds = {kind for kind, _, _ in self.running.values()}
                    assert not self.in_rounds or kinds <= {"verify"}, "a round is judged once all its steps are written"
                    assert draft.step is not None
                    assert draft.parent is not None
                    assert draft.source is Source.DRAFT
                    assert draft.step.end in (StepEnd.DELIMITER, StepEnd.EOS, StepEnd.STOP)
                    reference = target.step if target is not None else self.target(self.text_before(draft.parent))
                    assert reference is not None
                    if target is not None:
                        assert target.source is Source.TARGET
                        assert draft.parent is target.parent, "both steps of a pair follow the same prefix"
                        assert draft.step.end is reference.end
                    self._start(job, "verify", draft, Judged(job, self.accepts(draft.step, reference)))
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
                    self.last_action = action
        targets = sum(kind == "target" for kind, _, _ in self.running.values())
        assert targets <= max(1, self.depth * self.width) + 1, "at most depth times width, and one hedge"

    def _start(self, job: int, kind: str, node: Node, event: Event) -> None:
        assert job not in self.started
        self.started.add(job)
        self.running[job] = (kind, node, event)

    def _end(self, job: int, outcome: str) -> None:
        assert job in self.started
        assert job not in self.outcomes, "a job ends once"
        self.outcomes[job] = outcome

    def refutable(self) -> list[tuple[int, int]]:
        """Running target jobs, each with the rank of a candidate that the verifier would reject."""
        if not self.early:
            return []
        return [
            (job, candidate.rank)
            for job, (kind, node, event) in self.running.items()
            if kind == "target" and isinstance(event, StepWritten)
            for candidate in node.candidates
            if not self.accepts(self.draft(self.text_before(node), candidate.rank), event.step)
        ]

    def reply(self) -> Text:
        return tuple(node.step.text for node in self.committed if node.step is not None)


def model(letters: str, length: int, salt: int) -> Callable[[Text], Step]:
    """A deterministic model whose step depends on the whole prefix."""

    def write(before: Text) -> Step:
        value = zlib.crc32(repr((before, salt)).encode())  # `hash` of texts differs between processes
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


def target_only_reply(target: Callable[[Text], Step]) -> Text:
    texts: Text = ()
    while True:
        written = target(texts)
        texts += (written.text,)
        if written.end.ends_reply:
            return texts


def simulate(sim: Simulation, scheduler: LookaheadScheduler, choose: Callable[[int], int], failures: set[str]) -> None:
    sim.execute(scheduler.start())
    stale: list[Event] = []
    for _ in range(5000):
        if sim.last_action is not None:
            break
        if refutable := sim.refutable():
            sim.execute(scheduler.handle(Refuted(*refutable[choose(len(refutable))])))
        waits = [job for job, (kind, _, _) in sim.running.items() if kind != "target"]
        if waits and sim.late and choose(6) == 0:
            sim.execute(scheduler.handle(Late(waits[choose(len(waits))], "late")))
            if sim.last_action is not None:
                break
        jobs = sorted(sim.running)
        job = jobs[choose(len(jobs))]
        kind, _, event = sim.running.pop(job)
        if kind in failures:
            failures.discard(kind)
            event = Failed(job, f"{kind} failed")
        if kind == "verify":
            sim.outcomes[job] = "judged"
        if isinstance(event, Failed):
            sim.outcomes[job] = "failed"
        stale.append(event)
        sim.execute(scheduler.handle(event))
        sim.execute(scheduler.handle(stale[choose(len(stale))]))  # a repeated event changes nothing
    assert sim.last_action is not None, "the reply ends"
    assert not sim.running, "no job outlives the reply"


verdicts = st.sampled_from(["equal", "all", "none", "b"])


def verdict(name: str) -> Callable[[Step, Step], bool]:
    return {
        "equal": lambda a, b: a.token_ids == b.token_ids,
        "all": lambda a, b: True,
        "none": lambda a, b: False,
        "b": lambda a, b: a.text == "b",  # accepts different steps, and rejects equal ones
    }[name]


EVERYTHING: dict[str, Any] = {
    "depth": st.integers(0, 8),
    "hedge": st.booleans(),
    "mode": st.sampled_from(["asynchronous", "synchronous", "draft first"]),
    "width": st.integers(1, 3),
    "early": st.booleans(),
    "late": st.booleans(),
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
    late: bool,
    salts: tuple[int, int, bool],
    length: int,
    how: str,
    failing: set[str],
    data: st.DataObject,
) -> None:
    target = model("ab", length, salts[0])
    draft = candidates(target if salts[2] else model("ab", length, salts[1]), model("ab", length, salts[1] + 1))
    sim = Simulation(target, draft, verdict(how), depth, width, early, late, mode == "synchronous")
    scheduler = LookaheadScheduler(depth, width, hedge, mode == "synchronous", mode == "draft first")
    random = data.draw(st.randoms(use_true_random=False))
    simulate(sim, scheduler, random.randrange, set(failing))

    assert isinstance(sim.last_action, Finish)
    assert set(sim.outcomes) == sim.started, "every job ends"
    # With the draft first, equal steps have equal tokens, but their ends may differ.
    if how == "none" or (how == "equal" and mode != "draft first"):
        assert sim.reply() == target_only_reply(target), "the reply of the target alone"
    last = sim.committed[-1].step
    assert last is not None
    assert last.end is sim.last_action.end
    action_open = False
    for node in sim.committed:
        assert node.step is not None
        if node.source is Source.DRAFT:
            assert node.step.end not in (StepEnd.LIMIT, StepEnd.BUDGET, StepEnd.ACTION)
            assert not action_open, "only the target writes an action"
            assert depth > 0
        action_open = action_open or node.step.end is StepEnd.ACTION


@given(**EVERYTHING)
@settings(max_examples=3000)
def test_guarantees_hold_in_every_order_of_events(**case: Any) -> None:
    hold_guarantees(**case)


@given(depth=st.integers(0, 4), salt=st.integers(0, 500), data=st.data())
@settings(max_examples=200)
def test_a_failed_target_fails_the_reply(depth: int, salt: int, data: st.DataObject) -> None:
    target = model("ab", 5, salt)
    sim = Simulation(target, candidates(target, target), verdict("all"), depth)
    random = data.draw(st.randoms(use_true_random=False))
    simulate(sim, LookaheadScheduler(depth), random.randrange, {"target"})
    assert isinstance(sim.last_action, Fail)


def test_an_event_that_does_not_fit_its_job_raises() -> None:
    scheduler = LookaheadScheduler(depth=2)
    job = next(action.job for action in scheduler.start() if isinstance(action, StartTarget))
    with pytest.raises(ValueError, match="does not fit"):
        scheduler.handle(Judged(job, True))


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous", "draft first"])
@pytest.mark.parametrize("late_kind", ["draft", "verify"])
def test_the_target_completes_the_reply_beside_a_job_that_stays_late(mode: str, late_kind: str) -> None:
    target = model("ab", 5, 1)
    sim = Simulation(target, candidates(target, target), verdict("all"), 3)
    scheduler = LookaheadScheduler(3, 1, True, mode == "synchronous", mode == "draft first")
    sim.execute(scheduler.start())
    for _ in range(100):
        if sim.last_action is not None:
            break
        stuck = [job for job, (kind, _, _) in sim.running.items() if kind == late_kind]
        for job in stuck:
            sim.execute(scheduler.handle(Late(job, "silent")))
        job = next((job for job, (kind, _, _) in sim.running.items() if kind != late_kind), None)
        if job is not None:
            kind, _, event = sim.running.pop(job)
            if kind == "verify":
                sim.outcomes[job] = "judged"
            sim.execute(scheduler.handle(event))
    assert isinstance(sim.last_action, Finish)
    assert sim.reply() == target_only_reply(target)
    assert not sim.running
