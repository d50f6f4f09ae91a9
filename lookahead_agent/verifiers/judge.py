"""A language model as judge: its answer is read from log-probabilities, so that strictness is a threshold."""

from __future__ import annotations

import asyncio
import math

from lookahead_agent.engines.likeliest import likeliest
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import EngineError
from lookahead_agent.verifiers.protocol import StepPair, Verdict

SYSTEM_PROMPT = (
    "You compare two versions of the next step of a solution. They are equivalent if they say the same thing and "
    "reach the same results, whatever the wording. They are not if a number, a formula, a claim or a conclusion "
    "differs. Answer with one word: yes or no."
)
USER_PROMPT = (
    "Question:\n{question}\n\nVersion A:\n{target}\n\nVersion B:\n{draft}\n\nAre the two versions equivalent? "
    "Answer yes or no."
)


class JudgeVerifier:
    """Asks a model whether two steps mean the same.

    The paper's verifier (section 3.2), with p(aligned) = p(yes) / (p(yes) + p(no)) over the first token of the answer
    in place of the written answer.

    Args:
        engine: The judge; the target's engine may judge too, in its own batch.
        threshold: Least p(aligned) of an accepted pair, in [0, 1].
        system_prompt: What the judge is told to do.
        user_prompt: The question to it, a format string with `question`, `target` and `draft`.
    """

    def __init__(
        self,
        engine: Engine,
        threshold: float,
        system_prompt: str = SYSTEM_PROMPT,
        user_prompt: str = USER_PROMPT,
    ) -> None:
        self._engine = engine
        self._threshold = threshold
        self._system_prompt = system_prompt
        self._user_prompt = user_prompt

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair.

        Raises:
            EngineError: The judge failed, or gave neither yes nor no any probability.
        """
        aligned = await self.p_aligned(pair)
        return Verdict(aligned >= self._threshold, "judge", aligned)

    async def p_aligned(self, pair: StepPair) -> float:
        """Probability that the judge answers yes, in [0, 1]."""
        prompt = await asyncio.to_thread(self._prompt, pair)
        logprobs = await likeliest(self._engine, prompt)
        if not logprobs:
            raise EngineError("the judge gave no log-probabilities")
        return self._read({token: math.exp(value) for token, value in logprobs.items()})

    def _prompt(self, pair: StepPair) -> list[int]:
        user = self._user_prompt.format(
            question=pair.question, target=pair.target.text.strip(), draft=pair.draft.text.strip()
        )
        messages = [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": user}]
        return self._engine.tokenizer.chat_prompt(messages)

    def _read(self, probabilities: dict[int, float]) -> float:
        yes = no = 0.0
        for token, probability in probabilities.items():
            match self._engine.tokenizer.decode((token,)).strip().lower():
                case "yes":
                    yes += probability
                case "no":
                    no += probability
        if yes + no == 0.0:
            raise EngineError("the judge answered neither yes nor no")
        return yes / (yes + no)
