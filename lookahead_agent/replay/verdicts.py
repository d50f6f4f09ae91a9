"""The recorded verdicts of a replay, with the seconds that each took."""

import asyncio
from collections.abc import Iterable

from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.replay.ids import ReplayedReply, step_key


class RecordedVerifier:
    """Gives the recorded verdict on each pair after as many seconds; it rejects a pair without one."""

    def __init__(self, replies: Iterable[ReplayedReply]) -> None:
        self._verdicts = {key: verdict for reply in replies for key, verdict in reply.verdicts.items()}

    async def verify(self, pair: StepPair) -> Verdict:
        """Wait, and return the verdict on a pair."""
        recorded = self._verdicts.get((step_key(pair.draft.token_ids), step_key(pair.target.token_ids)))
        if recorded is None:
            return Verdict(False, "unrecorded")
        await asyncio.sleep(recorded.seconds)
        return Verdict(recorded.accepted, recorded.reason, recorded.score)
