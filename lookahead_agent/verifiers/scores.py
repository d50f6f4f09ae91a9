"""Verifiers that ask the target about a draft step, and need no target step: its likelihood, or a score."""

import math

from lookahead_agent.decoding.verifier import DraftStep, Verdict
from lookahead_agent.engines.protocol import Engine, sequence_logprobs, top_logprobs
from lookahead_agent.errors import EngineError

PROMPT = (
    "Evaluate the last reasoning step solely based on factual correctness and validity. Ignore style, phrasing, or "
    "overall usefulness. Answer with one digit from 0 (wrong) to 9 (certainly right)."
)


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


class ScoreVerifier:
    """Accepts a draft step that the target scores high enough, as SpecReason does (arXiv 2504.07891).

    The target writes only the rejected steps. The question follows the reply so far, so that the prefix cache holds
    everything but the step. The score is the mean digit over the digits' probabilities, which a threshold divides more
    finely than a single digit.
    """

    def __init__(self, engine: Engine, threshold: float) -> None:
        self._engine = engine
        self._threshold = threshold

    async def verify_draft(self, step: DraftStep) -> Verdict:
        """Judge one draft step."""
        question_ids = self._engine.tokenizer.follow_up(PROMPT)
        prompt = (*step.prefix_ids, *step.draft.token_ids, *question_ids)
        logprobs = await top_logprobs(self._engine, prompt, step.cache_salt)
        probabilities = {int(text): 0.0 for text in "0123456789"}
        for token, logprob in logprobs.items():
            text = self._engine.tokenizer.decode((token,)).strip()
            if len(text) == 1 and text in "0123456789":
                probabilities[int(text)] += math.exp(logprob)
        total = sum(probabilities.values())
        if total == 0.0:
            raise EngineError("the score was not a digit")
        score = sum(digit * probability for digit, probability in probabilities.items()) / total
        return Verdict(score >= self._threshold, "score", score, judge_calls=1)
