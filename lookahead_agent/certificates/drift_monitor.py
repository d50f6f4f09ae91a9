"""Looks again at a few of the steps that certified policies accept, and notices when they are no longer like those of
the calibration."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lookahead_agent.certificates.certificate import Certificate
from lookahead_agent.certificates.drift import DISPUTED_BELOW, DriftTest
from lookahead_agent.decoding.verifier import DraftVerifier, EarlyVerifier, PartialStep, StepPair, Verdict, Verifier
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import LookaheadError
from lookahead_agent.verifiers import EngineJudge
from lookahead_agent.verifiers.judge import JudgeVerifier, swapped

logger = logging.getLogger(__name__)

SHARE = 0.02
"""Of the accepted pairs that is looked at again unless somebody says otherwise."""
_WAITING = 64


@dataclass
class DriftCounts:
    """What became of the steps that were looked at again.

    Attributes:
        looked_again: How many there were.
        disputed: How many of them the target disputes.
        forgotten: Drawn, but dropped: too many waited, or the target could not be asked.
        tightened: How often a certificate was given up.
    """

    looked_again: int = 0
    disputed: int = 0
    forgotten: int = 0
    tightened: int = 0


class DriftMonitor:
    """Draws accepted steps and has the target judge them when it has nothing else to do.

    Args:
        target: The judge.
        give_up: Told of a certificate whose accepted steps are disputed more often than they may be.
    """

    def __init__(self, target: Engine, give_up: Callable[[Certificate], None]) -> None:
        self._target = target
        self._judge = JudgeVerifier(EngineJudge(target), DISPUTED_BELOW)
        self._give_up = give_up
        self._tests: dict[Certificate, DriftTest] = {}
        self._waiting: deque[tuple[Certificate, StepPair]] = deque()
        self._random = random.Random()
        self._task: asyncio.Task[None] | None = None
        self.counts = DriftCounts()

    def over(
        self, verifier: Verifier | DraftVerifier, certificate: Certificate, share: float
    ) -> Verifier | DraftVerifier:
        """The same verifier, of which this share of the accepted pairs is looked at again.

        Args:
            verifier: The certificate's.
            certificate: Says how many pairs of the calibration were disputed; if it does not, nothing is watched.
            share: Of accepted pairs, in [0, 1].
        """
        if certificate.disputed is None or share == 0 or isinstance(verifier, DraftVerifier):
            return verifier
        audited = _AuditedEarly if isinstance(verifier, EarlyVerifier) else _Audited
        return audited(verifier, lambda pair: self._draw(certificate, pair, share))

    def _draw(self, certificate: Certificate, pair: StepPair, share: float) -> None:
        if self._random.random() >= share:
            return
        if len(self._waiting) >= _WAITING:
            self._waiting.popleft()
            self.counts.forgotten += 1
        self._waiting.append((certificate, pair))

    def go_on(self) -> None:
        """Look at what waits, in the background, for as long as the target has nothing else to do."""
        if self._waiting and self._target.in_flight == 0 and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while self._waiting and self._target.in_flight == 0:
            certificate, pair = self._waiting.popleft()
            try:
                disputed = await self._is_disputed(pair)
            except LookaheadError as error:
                self.counts.forgotten += 1
                logger.debug("an accepted step could not be looked at again: %s", error)
                continue
            self._count(certificate, disputed)

    async def _is_disputed(self, pair: StepPair) -> bool:
        if pair.same_text:
            return False
        # In the other order than a judging policy has asked in, or it would only hear again what it knows.
        return not (await self._judge.verify(swapped(pair))).accepted

    def _count(self, certificate: Certificate, disputed: bool) -> None:
        self.counts.looked_again += 1
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
    """A verifier of which accepted pairs are told.

    Args:
        verifier: The verifier.
        accepted: Told of a pair that it accepted.
    """

    def __init__(self, verifier: Verifier, accepted: Callable[[StepPair], None]) -> None:
        self._verifier = verifier
        self._accepted = accepted

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        verdict = await self._verifier.verify(pair)
        if verdict.accepted:
            self._accepted(pair)
        return verdict


class _AuditedEarly(_Audited):
    """The same of a verifier that may rule a step out before it is complete."""

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        """Whether the verifier is certain to reject the pair."""
        assert isinstance(self._verifier, EarlyVerifier)
        return self._verifier.refutes(draft, target)
