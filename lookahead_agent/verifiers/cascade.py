"""The embedding where it is sure, the judge for what is left."""

from __future__ import annotations

from lookahead_agent.decoding.verifier import StepPair, Verdict, Verifier
from lookahead_agent.verifiers.embedding import Embedder


class CascadeVerifier:
    """First the embedding's sure zones, then the judge.

    Put `PrefilterVerifier` before it: an embedding hardly sees numbers.

    Args:
        embedder: Measures similarity.
        accept_above: Similarity from which a pair is accepted unasked, in [-1, 1].
        reject_below: Similarity under which a pair is rejected unasked, in [-1, 1].
        judge: Asked about pairs between the two; None rejects them.
    """

    def __init__(
        self,
        embedder: Embedder,
        accept_above: float,
        reject_below: float,
        judge: Verifier | None = None,
    ) -> None:
        self._embedder = embedder
        self._accept_above = accept_above
        self._reject_below = reject_below
        self._judge = judge

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        similarity = await self._embedder.similarity(pair.draft.text.strip(), pair.target.text.strip())
        if similarity >= self._accept_above:
            return Verdict(True, "similarity", similarity)
        if similarity < self._reject_below or self._judge is None:
            return Verdict(False, "similarity", similarity)
        return await self._judge.verify(pair)
