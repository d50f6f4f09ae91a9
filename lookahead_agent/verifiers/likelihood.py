"""The likelihood of the draft's step under the target: one prefill, no decoding."""

from lookahead_agent.decoding.verifier import DraftStep, Verdict
from lookahead_agent.engines.protocol import Engine, sequence_logprobs


class LikelihoodVerifier:
    """Accepts a draft step whose tokens have a high mean log-probability under the target.

    It needs no target step, but it is not cheap. vLLM gives log-probabilities only of tokens that it computes. So a
    request bypasses the prefix cache and prefills prompt and reply again. The threshold is in nats per token, at most
    zero.
    """

    def __init__(self, engine: Engine, threshold: float) -> None:
        self._engine = engine
        self._threshold = threshold

    async def verify_draft(self, step: DraftStep) -> Verdict:
        """Judge one draft step."""
        values = await sequence_logprobs(self._engine, step.prefix_ids, step.draft.token_ids, step.cache_salt)
        mean = sum(values) / len(step.draft.token_ids)
        return Verdict(mean >= self._threshold, "likelihood", mean, judge_calls=1)
