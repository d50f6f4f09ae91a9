"""Judges a few of the steps again that certified policies accept, and notices when they differ from the calibration's.

The test is sequential. If a share of at most b of the accepted steps is disputed, the likelihood ratio of another share
q > b after any number of steps has a mean of at most 1, and so has the mean of several ratios. By Ville's inequality it
ever reaches 1/δ with a probability of at most δ: the test may be looked at after every step, for ever.
"""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lookahead_agent.certificates.certificate import Certificate
from lookahead_agent.certificates.risk import upper_bound
from lookahead_agent.decoding.verifier import DraftVerifier, EarlyVerifier, StepPair, Verdict, Verifier
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import LookaheadError

logger = logging.getLogger(__name__)

DISPUTED_BELOW = 0.5  # the target, asked whether two steps are equivalent, disputes them with less p(yes)
AUDIT_RATE = 0.02  # share of the accepted steps that is audited by default
_LEVEL = 0.01  # probability δ with which the test ever raises an alarm where nothing has changed
_BASE_LEVEL = 0.05
_PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # shares that the test looks for, as parts of the way from the bound to 1
_WAITING = 64


class DriftTest:
    """Whether a share has grown over the one of the calibration; `level` is δ."""

    def __init__(self, disputed: int, accepted: int, level: float = _LEVEL) -> None:
        self.bound = upper_bound(accepted, disputed, _BASE_LEVEL)  # of the share that the calibration allows
        self._alternatives = [self.bound + (1 - self.bound) * part for part in _PARTS]
        self._logs = [0.0] * len(_PARTS)
        self._alarm = math.log(len(_PARTS) / level)
        self.drifted = False  # whether the alarm was raised, once and for all

    def add(self, disputed: bool) -> None:
        """Tell about one more step, drawn from those that were accepted."""
        if self.bound >= 1:
            return  # nothing can be more than that
        for number, share in enumerate(self._alternatives):
            ratio = share / self.bound if disputed else (1 - share) / (1 - self.bound)
            self._logs[number] += math.log(ratio)
        most = max(self._logs)
        total = most + math.log(math.fsum(math.exp(each - most) for each in self._logs))
        self.drifted = self.drifted or total >= self._alarm


@dataclass
class DriftCounts:
    """Accepted steps that were drawn to be audited, by what became of them."""

    audited: int = 0  # judged again
    disputed: int = 0  # of these, disputed by the target
    dropped: int = 0  # not judged again: too many waited, or the target could not be asked
    tightened: int = 0  # how often a certificate was given up


class DriftMonitor:
    """Draws accepted steps and has the target judge them when idle; `give_up` is told of a certificate to drop."""

    def __init__(self, target: Engine, judge: Verifier, give_up: Callable[[Certificate], None]) -> None:
        self._target = target
        self._judge = judge
        self._give_up = give_up
        self._tests: dict[Certificate, DriftTest] = {}
        self.waiting: deque[tuple[Certificate, StepPair]] = deque()  # accepted steps to be audited
        self._random = random.Random()
        self._task: asyncio.Task[None] | None = None
        self.counts = DriftCounts()

    def audited(
        self, verifier: Verifier | DraftVerifier, certificate: Certificate, rate: float
    ) -> Verifier | DraftVerifier:
        """The same verifier, of which this share of the accepted pairs is audited, in [0, 1].

        No pair is audited if the certificate lacks the number of disputed pairs of its calibration.
        """
        if certificate.disputed is None or rate == 0 or isinstance(verifier, DraftVerifier):
            return verifier
        return _Audited(verifier, lambda pair: self._draw(certificate, pair, rate))

    def _draw(self, certificate: Certificate, pair: StepPair, rate: float) -> None:
        if self._random.random() >= rate:
            return
        if len(self.waiting) >= _WAITING:
            self.waiting.popleft()
            self.counts.dropped += 1
        self.waiting.append((certificate, pair))

    def audit_waiting(self) -> None:
        """Audit what waits, in the background, for as long as the target has nothing else to do."""
        if self.waiting and self._target.in_flight == 0 and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._audit())

    async def _audit(self) -> None:
        while self.waiting and self._target.in_flight == 0:
            certificate, pair = self.waiting.popleft()
            try:
                # In the other order than a judging policy has asked in, or it would only hear again what it knows.
                disputed = not pair.same_text and not (await self._judge.verify(pair.swapped)).accepted
            except LookaheadError as error:
                self.counts.dropped += 1
                logger.debug("an accepted step could not be audited: %s", error)
                continue
            self._count(certificate, disputed)

    def _count(self, certificate: Certificate, disputed: bool) -> None:
        self.counts.audited += 1
        self.counts.disputed += disputed
        if certificate not in self._tests:
            assert certificate.disputed is not None
            self._tests[certificate] = DriftTest(certificate.disputed, certificate.accepted)
        test = self._tests[certificate]
        if test.drifted:
            return
        test.add(disputed)
        if test.drifted:
            self.counts.tightened += 1
            logger.warning(
                "steps accepted at the risk %g are disputed more often than in the calibration (over %.3f of them): "
                "the policy is tightened; calibrate again on problems like these",
                certificate.risk,
                test.bound,
            )
            self._give_up(certificate)


class _Audited:
    """A verifier that calls `accepted` with each pair that it accepts."""

    def __init__(self, verifier: Verifier, accepted: Callable[[StepPair], None]) -> None:
        self._verifier = verifier
        self._accepted = accepted
        if isinstance(verifier, EarlyVerifier):
            self.refutes = verifier.refutes

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        verdict = await self._verifier.verify(pair)
        if verdict.accepted:
            self._accepted(pair)
        return verdict
