"""Discrete-event simulations: the decoder's scheduler on virtual time, and a target with a shared draft."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from lookahead_agent.decoding import step
from lookahead_agent.decoding.scheduler import LookaheadScheduler

Draw = Callable[[random.Random], float]  # draws one duration


def constant(time: float) -> Draw:
    """Create a draw that always returns this time."""
    return lambda _: time


@dataclass(frozen=True)
class Durations:
    """The durations of jobs, in any unit of time; each job draws its own."""

    target: Draw = lambda _: 1.0  # a target step that runs alone
    draft: Draw = lambda _: 0.25
    verifier: Draw = lambda _: 0.0
    # Factor on the time of target steps while so many run in parallel: the cost of a batch
    slowdown: Callable[[int], float] = lambda _: 1.0


@dataclass(frozen=True)
class SimulatedReply:
    """The result of one simulated reply."""

    steps: int  # committed steps
    accepted: int  # committed steps of the draft
    seconds: float  # duration in the unit of `Durations`
    alone: float  # mean time of the target alone for as many steps

    @property
    def speedup(self) -> float:
        """The speedup over the target alone."""
        return self.alone / self.seconds


@dataclass
class _Simulation:
    durations: Durations
    alpha: float
    steps: int
    rng: random.Random
    now: float = 0.0
    committed: int = 0
    accepted: int = 0
    finished: bool = False
    _agenda: list[tuple[float, int, step.Event]] = field(default_factory=list)
    # Running target steps by job, with the time that each would still take alone.
    _writing: dict[int, tuple[float, step.StepWritten]] = field(default_factory=dict)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)

    def carry_out(self, actions: list[step.Action]) -> None:
        for action in actions:
            match action:
                case step.StartDraft(job, node):
                    # The job number is the token: the scheduler drops candidates with equal tokens.
                    self._after(self.durations.draft, step.StepWritten(job, self._step(node.position, job)))
                case step.StartTarget(job, node):
                    written = step.StepWritten(job, self._step(node.position))
                    self._writing[job] = self.durations.target(self.rng), written
                case step.Verify(job):
                    self._after(self.durations.verifier, step.Judged(job, self.rng.random() < self.alpha))
                case step.Commit(node):
                    self.committed += 1
                    self.accepted += node.source is step.Source.DRAFT
                case step.Finish():
                    self.finished = True
                case step.Abort(job):
                    # The event of an aborted draft step still arrives, and the scheduler ignores it.
                    self._writing.pop(job, None)

    def _step(self, position: int, token: int = 0) -> step.Step:
        return step.Step((token,), "step", step.StepEnd.EOS if position + 1 >= self.steps else step.StepEnd.DELIMITER)

    def _after(self, duration: Draw, event: step.Event) -> None:
        heapq.heappush(self._agenda, (self.now + duration(self.rng), next(self._order), event))

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
    """Simulate one long reply of `steps` steps; the verifier accepts a pair with probability `alpha`.

    The other arguments are those of `LookaheadScheduler`.
    """
    simulation = _Simulation(durations, alpha, steps, random.Random(seed))
    scheduler = LookaheadScheduler(depth, width, hedge=hedge, synchronous=synchronous)
    simulation.carry_out(scheduler.start())
    while not simulation.finished:
        simulation.carry_out(scheduler.handle(simulation.next_event()))
    sample = random.Random(seed)
    mean = sum(durations.target(sample) for _ in range(1000)) / 1000
    return SimulatedReply(simulation.committed, simulation.accepted, simulation.now, mean * simulation.committed)


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

    The draft writes one token per time c, from the last token that both agree on. A forward pass of the target takes
    the draft tokens ahead of it, and gains the accepted ones and one token of its own. The draft restarts after a
    rejection, and where the target has overtaken it with another token.

    Args:
        alpha: Probability that a draft token is accepted (α₂), in [0, 1].
        c: Time of a draft token over that of a target's forward pass of one token.
        most: Most draft tokens of a forward pass.
        cost: Time of a forward pass by its number of tokens, the draft tokens and one more; 1 for one token.
    """
    rng = random.Random(seed)

    def count_accepted_ahead() -> int:
        count = 0
        while count < tokens and rng.random() < alpha:
            count += 1
        return count

    now, written = 0.0, 0
    origin, started, accepted = 0, 0.0, count_accepted_ahead()
    while written < tokens:
        drafted = origin + int((now - started) / c + 1e-9)
        draft_tokens = max(0, min(drafted - written, most))
        gained = min(draft_tokens, origin + accepted - written) + 1
        now += cost(draft_tokens + 1)
        written += gained
        if written > origin + accepted:  # the target's last token differs from the draft's
            origin, started, accepted = written, now, count_accepted_ahead()
        elif written > origin + int((now - started) / c + 1e-9):
            # The target has caught up with a slower draft, which continues from the target's token.
            accepted -= written - origin
            origin, started = written, now
    return written / now
