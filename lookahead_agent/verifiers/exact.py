"""The verifier that changes nothing."""

from lookahead_agent.decoding.verifier import PartialStep, StepPair, Verdict


class ExactVerifier:
    """Accepts a draft step that is the target's, token for token: other tokens of the same text lead elsewhere."""

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        same = pair.draft.token_ids == pair.target.token_ids
        return Verdict(same, "same tokens" if same else "other tokens")

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        """Whether the steps differ already."""
        common = min(len(draft.token_ids), len(target.token_ids))
        # It is asked after every token, so only the last one that both have is new.
        if common and draft.token_ids[common - 1] != target.token_ids[common - 1]:
            return True
        return draft.complete and len(target.token_ids) > len(draft.token_ids)
