"""Verifiers without a model: the lossless one, and the control of an experiment."""

import hashlib

from lookahead_agent.decoding.verifier import PartialStep, StepPair, Verdict


class ExactVerifier:
    """Accepts a draft step with the target step's token ids: other tokens of the same text change the later ones."""

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        same = pair.draft.token_ids == pair.target.token_ids
        return Verdict(same, "same tokens" if same else "other tokens")

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        """Whether the steps differ already."""
        common = min(len(draft.token_ids), len(target.token_ids))
        # The loop calls this after every token, so only the last common token is new.
        if common and draft.token_ids[common - 1] != target.token_ids[common - 1]:
            return True
        return draft.complete and len(target.token_ids) > len(draft.token_ids)


def hash_to_unit_interval(*parts: object) -> float:
    """A pseudorandom number in [0, 1), the same for the same arguments in every process."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8]) / 2**64


class RandomVerifier:
    """Accepts with a fixed probability; the value of another verifier is its gain over this one.

    The verdict on a pair depends on the seed and the texts, not on the order of events.
    """

    def __init__(self, probability: float, seed: int = 0) -> None:
        self._probability = probability
        self._seed = seed

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        drawn = hash_to_unit_interval(self._seed, pair.question, pair.before, pair.draft.text)
        return Verdict(drawn < self._probability, "chance", drawn)
