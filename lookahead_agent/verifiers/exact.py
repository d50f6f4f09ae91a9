"""The lossless verifier."""

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
