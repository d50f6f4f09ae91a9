"""The control: accepts by chance, whatever the steps are."""

import hashlib

from lookahead_agent.decoding.verifier import StepPair, Verdict


def draw(*of: object) -> float:
    """A number in [0, 1) that looks like chance, and is the same for the same things in every process."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, of)).encode()).digest()[:8]) / 2**64


class RandomVerifier:
    """Accepts with a fixed probability: other verifiers are worth what they gain over it.

    The verdict on a pair depends on the seed and the texts, not on the order of events.
    """

    def __init__(self, probability: float, seed: int = 0) -> None:
        self._probability = probability
        self._seed = seed

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        drawn = draw(self._seed, pair.question, pair.before, pair.draft.text)
        return Verdict(drawn < self._probability, "chance", drawn)
