"""A language model as judge: its answer is read from log-probabilities, so that strictness is a threshold."""

from __future__ import annotations

import string
from dataclasses import replace

from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError
from lookahead_agent.verifiers.judge_model import JudgeModel

SYSTEM_PROMPT = (
    "You compare two versions of the next step of a solution. They are equivalent if they say the same thing and "
    "reach the same results, whatever the wording. They are not if a number, a formula, a claim or a conclusion "
    "differs. Answer with one word: yes or no."
)
USER_PROMPT = (
    "Question:\n{question}\n\nVersion A:\n{target}\n\nVersion B:\n{draft}\n\nAre the two versions equivalent? "
    "Answer yes or no."
)
_PLACEHOLDERS = {"question", "before", "target", "draft"}
# What is left of the question and of the reply so far if the judge's context is too small for all of them.
_SHORTENED = 600


def check_prompt(prompt: str) -> str:
    """Return a judge's prompt if it can be filled in.

    Raises:
        ConfigurationError: It has other placeholders than {question}, {before}, {target} and {draft}, lacks one of
            the last two, or changes one: a width such as {target:>9} can ask for any amount of memory.
    """
    try:
        fields = [field for field in string.Formatter().parse(prompt) if field[1] is not None]
    except ValueError as error:
        raise ConfigurationError(
            f"the judge's prompt is not a format string ({error}); braces are {{{{ and }}}}"
        ) from None
    names = {str(name) for _, name, _, _ in fields}
    if any(width or conversion for _, _, width, conversion in fields):
        raise ConfigurationError("the placeholders of the judge's prompt have no width, format or conversion: {target}")
    if not {"target", "draft"} <= names <= _PLACEHOLDERS:
        raise ConfigurationError(
            "the judge's prompt needs {target} and {draft}, and may have {question} and {before}; it has "
            + (", ".join(f"{{{name}}}" for name in sorted(names)) or "none")
        )
    return prompt


class JudgeVerifier:
    """Asks a model whether two steps mean the same.

    The paper's verifier (section 3.2), with p(aligned) = p(yes) / (p(yes) + p(no)) over the first token of the answer
    in place of the written answer. If a pair is too long for the judge's context, the question and the reply so far
    are shortened to their ends; if the steps themselves are, the pair is rejected.

    Args:
        model: The judge.
        threshold: Least p(aligned) of an accepted pair, in [0, 1].
        system_prompt: What the judge is told to do.
        user_prompt: The question to it, a format string with `target`, `draft`, and possibly `question` and `before`.
        both_orders: Whether a pair that is accepted is judged again with the two steps in each other's place, and the
            lower p(aligned) decides: small judges favour a place.

    Raises:
        ConfigurationError: A prompt that cannot be filled in.
    """

    def __init__(
        self,
        model: JudgeModel,
        threshold: float,
        system_prompt: str = SYSTEM_PROMPT,
        user_prompt: str = USER_PROMPT,
        *,
        both_orders: bool = False,
    ) -> None:
        self._model = model
        self._threshold = threshold
        self._system_prompt = system_prompt
        self._user_prompt = check_prompt(user_prompt)
        self._both_orders = both_orders

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair.

        Raises:
            EngineError: The judge failed, or gave neither yes nor no any probability.
        """
        try:
            aligned, calls = await self.p_aligned(pair), 1
            if self._both_orders and aligned >= self._threshold:
                aligned, calls = min(aligned, await self.p_aligned(swapped(pair))), 2
        except ContextLengthError:
            return Verdict(False, "too long for the judge")
        return Verdict(aligned >= self._threshold, "judge", aligned, judge_calls=calls)

    async def p_aligned(self, pair: StepPair) -> float:
        """Probability that the judge answers yes, in [0, 1].

        Raises:
            EngineError: The judge failed, or gave neither yes nor no any probability.
            ContextLengthError: The two steps do not fit the judge's context.
        """
        try:
            words = await self._model.first_words(self._messages(pair, None))
        except ContextLengthError:
            words = await self._model.first_words(self._messages(pair, _SHORTENED))
        yes = sum(probability for word, probability in words.items() if word.strip().lower() == "yes")
        no = sum(probability for word, probability in words.items() if word.strip().lower() == "no")
        if yes + no == 0.0:
            raise EngineError("the judge answered neither yes nor no")
        return yes / (yes + no)

    def _messages(self, pair: StepPair, longest: int | None) -> list[dict[str, str]]:
        user = self._user_prompt.format(
            question=_end(pair.question, longest),
            before=_end(pair.before, longest),
            target=pair.target.text.strip(),
            draft=pair.draft.text.strip(),
        )
        return [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": user}]


def swapped(pair: StepPair) -> StepPair:
    """The pair with the draft's step and the target's in each other's place."""
    return replace(pair, draft=pair.target, target=pair.draft)


def _end(text: str, longest: int | None) -> str:
    return text if longest is None or len(text) <= longest else "…" + text[-longest:]
