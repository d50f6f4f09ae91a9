"""Checks that need no model: equal texts are accepted, different results and false arithmetic are rejected."""

from lookahead_agent.decoding.foreign import call_part
from lookahead_agent.decoding.verifier import PartialStep, StepPair, Verdict, Verifier
from lookahead_agent.verifiers.arithmetic import false_only_in
from lookahead_agent.verifiers.results import different_results, numbers, numbers_so_far


def rejection(draft: str, target: str) -> str | None:
    """The reason to reject a pair without a model; None: there is none."""
    return different_results(draft, target) or ("false arithmetic" if false_only_in(draft, target) else None)


class PrefilterVerifier:
    """Accepts equal texts, rejects different results or false arithmetic, and passes other pairs to a verifier.

    A small judge is far too lenient about numbers, and an embedding hardly distinguishes them. `same_results` compares
    numbers, units and equations, and checks the draft's arithmetic.
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
        return await call_part(self._verifier, lambda: self._verifier.verify(pair))

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        """Whether the target's step has a number that the draft's complete step lacks."""
        return self._same_results and draft.complete and not numbers_so_far(target.text) <= numbers(draft.text)
