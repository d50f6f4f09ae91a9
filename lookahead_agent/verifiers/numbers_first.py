"""A check before any model is asked: steps with different numbers do not mean the same."""

from __future__ import annotations

from lookahead_agent.verifiers.numbers import numbers, numbers_so_far
from lookahead_agent.verifiers.protocol import StepPair, Verdict, Verifier, Writing


class NumbersFirst:
    """Rejects pairs with different numbers and leaves the others to another verifier.

    A small judge is far too lenient about numbers, and an embedding hardly sees them.

    Args:
        verifier: Decides about pairs with the same numbers.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        if numbers(pair.draft.text) != numbers(pair.target.text):
            return Verdict(False, "different numbers")
        return await self._verifier.verify(pair)

    def refutes(self, draft: Writing, target: Writing) -> bool:
        """Whether the target's step has a number that the draft's complete step has not."""
        return draft.complete and not numbers_so_far(target.text) <= numbers(draft.text)
