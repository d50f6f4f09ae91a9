"""Verifiers of a replay: recorded verdicts after their recorded time, and drawn ones."""

import asyncio
from collections.abc import Sequence
from statistics import fmean

from lookahead_agent.decoding.verifier import EarlyVerifier, PartialStep, StepPair, Verdict
from lookahead_agent.replay.replies import ReplayedReply
from lookahead_agent.verifiers.model_free import hash_to_unit_interval


class RecordedVerifier:
    """Gives each pair of steps its recorded verdict, after the recorded time; other pairs are rejected.

    `early` is the verifier of the recorded run, if that could rule out steps early.
    """

    def __init__(self, replies: Sequence[ReplayedReply], early: EarlyVerifier | None = None) -> None:
        self._early = early
        self._verdicts = {
            (reply.recording.name, reply.step_ids(verdict.draft), reply.step_ids(verdict.target)): verdict
            for reply in replies
            for verdict in reply.recording.verdicts
        }

    async def verify(self, pair: StepPair) -> Verdict:
        """Look up the verdict on a pair."""
        recorded = self._verdicts.get((pair.question, pair.draft.token_ids, pair.target.token_ids))
        if recorded is None:
            return Verdict(False, "not recorded")
        await asyncio.sleep(recorded.seconds)
        return Verdict(recorded.accepted, recorded.reason, recorded.score)

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        """Whether the recorded run's verifier rules the draft step out already."""
        return self._early is not None and self._early.refutes(draft, target)


class DrawnVerifier:
    """Accepts with a fixed probability, by one draw for each position of a reply, after the mean recorded time."""

    def __init__(self, replies: Sequence[ReplayedReply], alpha: float, seed: int = 0) -> None:
        self._alpha = alpha
        self._seed = seed
        seconds = [verdict.seconds for reply in replies for verdict in reply.recording.verdicts]
        self._seconds = fmean(seconds) if seconds else 0.0

    async def verify(self, pair: StepPair) -> Verdict:
        """Draw the verdict on a pair."""
        await asyncio.sleep(self._seconds)
        drawn = hash_to_unit_interval(self._seed, pair.question, pair.position)
        return Verdict(drawn < self._alpha, "drawn", drawn)
