"""The control of an experiment: accepts at random, whatever the steps are."""

import hashlib

from lookahead_agent.decoding.verifier import StepPair, Verdict


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
