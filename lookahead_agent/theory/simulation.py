"""Discrete-event simulations: the decoder's scheduler on virtual time, and a target with a shared draft."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from lookahead_agent.decoding import step
from lookahead_agent.decoding.scheduler import LookaheadScheduler

Draw = Callable[[random.Random], float]  # draws how long something takes


def always(time: float) -> Draw:
    """The same time, whatever is drawn."""
    return lambda _: time


@dataclass(frozen=True)
class Durations:
    """Durations of work, in any unit of time; each is drawn anew for every job."""

    target: Draw = lambda _: 1.0  # of a target step, if it is the only one
    draft: Draw = lambda _: 0.25
    verifier: Draw = lambda _: 0.0
    # How much longer target steps take while so many are written at once, from moment to moment: the cost of a batch
    slowdown: Callable[[int], float] = lambda _: 1.0


@dataclass(frozen=True)
class SimulatedReply:
    """A simulated reply of the decoder."""

    steps: int  # committed
    accepted: int  # those from the draft
    seconds: float  # in the unit of the durations
    alone: float  # time that the target alone would take for as many steps, on average

    @property
    def speedup(self) -> float:
        """Against the target alone."""
        return self.alone / self.seconds


@dataclass
class _World:
    durations: Durations
    alpha: float
    steps: int
    randomly: random.Random
    now: float = 0.0
    committed: int = 0
    accepted: int = 0
    finished: bool = False
    _agenda: list[tuple[float, int, step.Event]] = field(default_factory=list)
    # Target steps that are being written, with the time that each would still take alone.
    _writing: dict[int, tuple[float, step.StepWritten]] = field(default_factory=dict)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)

    def carry_out(self, actions: list[step.Action]) -> None:
        for action in actions:
            match action:
                case step.StartDraft(job, node):
                    # Candidates say different things: equal ones would be dropped.
                    self._after(self.durations.draft, step.StepWritten(job, self._step(node.position, job)))
                case step.StartTarget(job, node):
                    written = step.StepWritten(job, self._step(node.position))
                    self._writing[job] = self.durations.target(self.randomly), written
                case step.Verify(job):
                    self._after(self.durations.verifier, step.Judged(job, self.randomly.random() < self.alpha))
                case step.Commit(node):
                    self.committed += 1
                    self.accepted += node.source is step.Source.DRAFT
                case step.Finish():
                    self.finished = True
                case step.Abort(job):
                    # A draft step's event still comes, and the machine ignores it.
                    self._writing.pop(job, None)

    def _step(self, position: int, token: int = 0) -> step.Step:
        return step.Step((token,), "step", step.StepEnd.EOS if position + 1 >= self.steps else step.StepEnd.DELIMITER)

    def _after(self, duration: Draw, event: step.Event) -> None:
        heapq.heappush(self._agenda, (self.now + duration(self.randomly), next(self._order), event))

    def next_event(self) -> step.Event:
        slowdown = self.durations.slowdown(len(self._writing)) if self._writing else 1.0
        first = min(self._writing, key=lambda job: self._writing[job][0], default=None)
        ends = self.now + self._writing[first][0] * slowdown if first is not None else float("inf")
        if first is not None and not (self._agenda and self._agenda[0][0] < ends):
            _, written = self._writing.pop(first)
            self._advance(ends, slowdown)
            return written
        at, _, event = heapq.heappop(self._agenda)
        self._advance(at, slowdown)
        return event

    def _advance(self, to: float, slowdown: float) -> None:
        done = (to - self.now) / slowdown
        self._writing = {job: (left - done, written) for job, (left, written) in self._writing.items()}
        self.now = to


def simulate(
    alpha: float,
    depth: int,
    durations: Durations,
    *,
    steps: int = 10_000,
    width: int = 1,
    synchronous: bool = False,
    hedge: bool = True,
    seed: int = 0,
) -> SimulatedReply:
    """Simulate one long reply of so many steps; the verifier accepts a pair with the probability `alpha`.

    The other arguments are those of `LookaheadScheduler`.
    """
    world = _World(durations, alpha, steps, random.Random(seed))
    scheduler = LookaheadScheduler(depth, width, hedge=hedge, synchronous=synchronous)
    world.carry_out(scheduler.start())
    while not world.finished:
        world.carry_out(scheduler.handle(world.next_event()))
    sample = random.Random(seed)
    mean = sum(durations.target(sample) for _ in range(1000)) / 1000
    return SimulatedReply(world.committed, world.accepted, world.now, mean * world.committed)


def simulate_shared_draft(
    alpha: float,
    c: float,
    most: int,
    cost: Callable[[int], float] = lambda _: 1.0,
    *,
    tokens: int = 20_000,
    seed: int = 0,
) -> float:
    """The speedup of one long simulated reply of a target with a shared draft.

    The draft writes a token every c from the last token that both agree about. A pass of the target takes the tokens
    that are ahead of it by then, and gains those before the first rejected one and one of its own. After a rejection,
    or where the target has overtaken it with another token, the draft begins anew.

    Args:
        alpha: Probability that a token of the draft is the target's (α₂), in [0, 1].
        c: Time of a draft token over that of a target's pass of one token.
        most: Draft tokens of a pass at most.
        cost: Time of a pass by its number of tokens, the draft's and one more; 1 for one.
    """
    draw = random.Random(seed)

    def accepted_ahead() -> int:
        count = 0
        while count < tokens and draw.random() < alpha:
            count += 1
        return count

    now, written = 0.0, 0
    begun, began_at, accepted = 0, 0.0, accepted_ahead()
    while written < tokens:
        drafted = begun + int((now - began_at) / c + 1e-9)
        draft_tokens = max(0, min(drafted - written, most))
        gained = min(draft_tokens, begun + accepted - written) + 1
        now += cost(draft_tokens + 1)
        written += gained
        if written > begun + accepted:  # the target's own token at the end is not the draft's
            begun, began_at, accepted = written, now, accepted_ahead()
        elif written > begun + int((now - began_at) / c + 1e-9):
            # It has caught up with a draft that is slower: the draft goes on from the target's token.
            accepted -= written - begun
            begun, began_at = written, now
    return written / now
