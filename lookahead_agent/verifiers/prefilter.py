"""Checks before any model is asked: the same text means the same, different results and false arithmetic do not."""

from lookahead_agent.decoding.verifier import PartialStep, StepPair, Verdict, Verifier
from lookahead_agent.verifiers.arithmetic import false_only_in
from lookahead_agent.verifiers.results import different_results, numbers, numbers_so_far


def rejection(draft: str, target: str) -> str | None:
    """The reason to reject a pair of steps before any model is asked; None: there is none."""
    return different_results(draft, target) or ("false arithmetic" if false_only_in(draft, target) else None)


class PrefilterVerifier:
    """Accepts equal texts, rejects pairs with different results or false arithmetic, and leaves the others.

    A small judge is far too lenient about numbers, and an embedding hardly sees them.
    With `same_results` numbers, units and equations are compared, and the draft's arithmetic is checked.
    """

    def __init__(self, verifier: Verifier, *, same_results: bool = True) -> None:
        self._verifier = verifier
        self._same_results = same_results

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        draft, target = pair.draft.text.strip(), pair.target.text.strip()
        if draft == target:
            return Verdict(True, "same text")
        if self._same_results and (reason := rejection(draft, target)) is not None:
            return Verdict(False, reason)
        return await self._verifier.verify(pair)

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        """Whether the target's step has a number that the draft's complete step has not."""
        return self._same_results and draft.complete and not numbers_so_far(target.text) <= numbers(draft.text)
