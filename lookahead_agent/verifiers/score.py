"""SpecReason's verifier: the target gives the draft's step a mark (arXiv 2504.07891)."""

import math

from lookahead_agent.decoding.verifier import DraftStep, Verdict
from lookahead_agent.engines.protocol import Engine, top_logprobs
from lookahead_agent.errors import EngineError

PROMPT = (
    "Evaluate the last reasoning step solely based on factual correctness and validity. Ignore style, phrasing, or "
    "overall usefulness. Answer with one digit from 0 (wrong) to 9 (certainly right)."
)


class ScoreVerifier:
    """Accepts a draft step that the target marks high enough; the target writes only what it marked too low.

    The question follows the reply as far as it goes, so that the prefix cache has all but the step itself. The mark is
    the mean over the digits' probabilities, which a threshold can be held against more finely than one digit.
    """

    def __init__(self, engine: Engine, threshold: float) -> None:
        self._engine = engine
        self._threshold = threshold

    async def verify_draft(self, step: DraftStep) -> Verdict:
        """Judge one draft step."""
        asked = self._engine.tokenizer.follow_up(PROMPT)
        logprobs = await top_logprobs(self._engine, (*step.prefix_ids, *step.draft.token_ids, *asked))
        marks = {int(text): 0.0 for text in "0123456789"}
        for token, logprob in logprobs.items():
            text = self._engine.tokenizer.decode((token,)).strip()
            if len(text) == 1 and text in "0123456789":
                marks[int(text)] += math.exp(logprob)
        total = sum(marks.values())
        if total == 0.0:
            raise EngineError("the target marked the draft's step with no digit")
        mark = sum(digit * probability for digit, probability in marks.items()) / total
        return Verdict(mark >= self._threshold, "score", mark, judge_calls=1)
