"""How likely the target finds the draft's step: one prefill, no decoding."""

from __future__ import annotations

from contextlib import aclosing

from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.errors import EngineError
from lookahead_agent.verifiers.protocol import DraftStep, Verdict


class LikelihoodVerifier:
    """Accepts a draft step whose tokens have a high mean log-probability under the target.

    It needs no step of the target, but it is not cheap: vLLM gives log-probabilities only of tokens that it computes,
    so such a request reads nothing from the prefix cache and prefills the prompt and the whole reply again.

    Args:
        engine: The target.
        threshold: Least mean log-probability of an accepted step, in nats per token, at most 0.
    """

    def __init__(self, engine: Engine, threshold: float) -> None:
        self._engine = engine
        self._threshold = threshold

    async def verify_draft(self, step: DraftStep) -> Verdict:
        """Judge one draft step.

        Raises:
            EngineError: The target gave no log-probabilities.
        """
        prompt = (*step.prefix_ids, *step.draft.token_ids)
        sampling = Sampling(max_tokens=1, prompt_logprobs=True)
        async with aclosing(self._engine.generate(prompt, sampling)) as deltas:
            async for delta in deltas:
                if delta.prompt_logprobs is not None:
                    values = delta.prompt_logprobs[len(step.prefix_ids) :]
                    mean = sum(value for value in values if value is not None) / len(values)
                    return Verdict(mean >= self._threshold, "likelihood", mean, judge_calls=1)
        raise EngineError("the target gave no log-probabilities of the draft's step")
