"""Audits a sample of the steps that certified policies accept, and detects drift from the calibration.

The test is sequential. Let at most a share b of the accepted steps be disputed. Then the likelihood ratio of a share
q > b has a mean of at most 1 after any number of steps. So has the mean of several ratios. By Ville's inequality it
ever reaches 1/δ with a probability of at most δ, so the test may be read after every step.
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
from lookahead_agent.decoding.foreign import call_part
from lookahead_agent.decoding.verifier import DraftVerifier, EarlyVerifier, StepPair, Verdict, Verifier
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import LookaheadError
from lookahead_agent.system.background import describe

logger = logging.getLogger(__name__)

DISPUTED_BELOW = 0.5  # the target, as judge of their equivalence, disputes two steps with less p(yes)
AUDIT_RATE = 0.02  # share of the accepted steps that is audited by default
_LEVEL = 0.01  # probability δ that the test ever raises an alarm without drift
_BASE_LEVEL = 0.05  # level of the upper bound on the calibration's disputed share
_PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # alternative shares q, as fractions of the way from the bound to 1
_MAX_WAITING = 64  # most steps that wait for an audit


class DriftTest:
    """Tests whether the disputed share exceeds that of the calibration; `level` is δ."""

    def __init__(self, disputed: int, accepted: int, level: float = _LEVEL) -> None:
        self.bound = upper_bound(accepted, disputed, _BASE_LEVEL)  # upper bound b on the calibration's disputed share
        self._alternatives = [self.bound + (1 - self.bound) * part for part in _PARTS]
        self._log_ratios = [0.0] * len(_PARTS)
        self._alarm = math.log(len(_PARTS) / level)
        self.drifted = False  # whether the alarm was raised; never reset

    def add(self, disputed: bool) -> None:
        """Update the test with one more step, sampled from the accepted steps."""
        if self.bound >= 1:
            return  # no share exceeds 1
        for number, share in enumerate(self._alternatives):
            ratio = share / self.bound if disputed else (1 - share) / (1 - self.bound)
            self._log_ratios[number] += math.log(ratio)
        most = max(self._log_ratios)
        total = most + math.log(math.fsum(math.exp(log_ratio - most) for log_ratio in self._log_ratios))
        self.drifted = self.drifted or total >= self._alarm


@dataclass
class DriftCounts:
    """Accepted steps that were sampled for an audit, by outcome."""

    audited: int = 0  # judged again
    disputed: int = 0  # audited, and disputed by the target
    dropped: int = 0  # not judged again: too many waited, or the target failed
    tightened: int = 0  # certificates that were revoked


class DriftMonitor:
    """Samples accepted steps and lets the idle target judge them; calls `give_up` with a certificate to revoke."""

    def __init__(self, target: Engine, judge: Verifier, give_up: Callable[[Certificate], None]) -> None:
        self._target = target
        self._judge = judge
        self._give_up = give_up
        self._tests: dict[Certificate, DriftTest] = {}
        self.waiting: deque[tuple[Certificate, StepPair]] = deque()  # accepted steps to be audited
        self._random = random.Random()
        self._task: asyncio.Task[None] | None = None
        self.counts = DriftCounts()

    def wrap(
        self, verifier: Verifier | DraftVerifier, certificate: Certificate, rate: float
    ) -> Verifier | DraftVerifier:
        """Wrap a verifier so that this share of its accepted pairs is audited, in [0, 1].

        No pair is audited if the certificate lacks the number of disputed pairs of its calibration.
        """
        if certificate.disputed is None or rate == 0 or isinstance(verifier, DraftVerifier):
            return verifier
        return _Audited(verifier, lambda pair: self._draw(certificate, pair, rate))

    def _draw(self, certificate: Certificate, pair: StepPair, rate: float) -> None:
        if self._random.random() >= rate:
            return
        if len(self.waiting) >= _MAX_WAITING:
            self.waiting.popleft()
            self.counts.dropped += 1
        self.waiting.append((certificate, pair))

    def audit_waiting(self) -> None:
        """Audit the waiting steps in a background task, for as long as the target is idle."""
        if self.waiting and self._target.in_flight == 0 and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._audit())

    async def _audit(self) -> None:
        while self.waiting and self._target.in_flight == 0:
            certificate, pair = self.waiting.popleft()
            try:
                # Swapped: a judging policy has asked in the other order, and would hear the same answer again.
                disputed = not pair.same_text and not (await self._judge.verify(pair.swap())).accepted
            except Exception as error:  # the judge may be of the user's own, or its engine may end
                self.counts.dropped += 1
                log = logger.debug if isinstance(error, LookaheadError) else logger.warning
                log("an accepted step could not be audited: %s", describe(error))
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
    """A verifier that calls `on_accepted` with each pair that it accepts."""

    def __init__(self, verifier: Verifier, on_accepted: Callable[[StepPair], None]) -> None:
        self._verifier = verifier
        self._on_accepted = on_accepted
        if isinstance(verifier, EarlyVerifier):
            self.refutes = verifier.refutes

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        verdict = await call_part(self._verifier, lambda: self._verifier.verify(pair))
        if verdict.accepted:
            self._on_accepted(pair)
        return verdict
