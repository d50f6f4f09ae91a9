"""Language models as judges: an answer is read from log-probabilities, so that strictness is a threshold."""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines.protocol import Engine, top_logprobs
from lookahead_agent.engines.servers import RemoteModel, Server
from lookahead_agent.errors import ContextLengthError, EngineError

SYSTEM_PROMPT = (
    "You compare two versions of the next step of a solution. They are equivalent if they say the same thing and "
    "reach the same results, whatever the wording. They are not if a number, a formula, a claim or a conclusion "
    "differs. Answer with one word: yes or no."
)
USER_PROMPT = (
    "Question:\n{question}\n\nVersion A:\n{target}\n\nVersion B:\n{draft}\n\nAre the two versions equivalent? "
    "Answer yes or no."
)
_SHORTENED = 600  # Characters of the question that are left if the judge's context is too small for all of it

Messages = Sequence[Mapping[str, str]]


class JudgeModel(Protocol):
    """A chat model that is asked for one token."""

    async def first_token_probabilities(self, messages: Messages) -> Mapping[str, float]:
        """Probabilities of the likeliest first tokens of an answer, by text."""


@dataclass(frozen=True)
class JudgeVerifier:
    """Asks a model whether two steps mean the same: the paper's verifier (section 3.2).

    p(aligned) is p(yes) / (p(yes) + p(no)) over the answer's first token. Of a pair that is too long for the judge's
    context, the question is shortened to its end; if the steps themselves are too long, the pair is rejected.
    """

    model: JudgeModel
    threshold: float  # least p(aligned) of an accepted pair, in [0, 1]
    # Whether a pair that is accepted is judged again with the two steps in each other's place, and the lower p(aligned)
    # decides: small judges favour a place.
    both_orders: bool = False

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        try:
            aligned, calls = await self.p_aligned(pair), 1
            if self.both_orders and aligned >= self.threshold:
                aligned, calls = min(aligned, await self.p_aligned(pair.swapped)), 2
        except ContextLengthError:
            return Verdict(False, "too long for the judge")
        return Verdict(aligned >= self.threshold, "judge", aligned, judge_calls=calls)

    async def p_aligned(self, pair: StepPair) -> float:
        """Probability that the judge answers yes, in [0, 1]."""
        try:
            answers = await self.model.first_token_probabilities(_messages(pair, pair.question))
        except ContextLengthError:
            end = pair.question[-_SHORTENED:]
            question = end if end == pair.question else f"…{end}"
            answers = await self.model.first_token_probabilities(_messages(pair, question))
        yes, no = (sum(p for text, p in answers.items() if text.strip().lower() == word) for word in ("yes", "no"))
        if yes + no == 0.0:
            raise EngineError("the judge answered neither yes nor no")
        return yes / (yes + no)


def _messages(pair: StepPair, question: str) -> Messages:
    user = USER_PROMPT.format(question=question, target=pair.target.text.strip(), draft=pair.draft.text.strip())
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": user}]


class EngineJudge:
    """A judge on an engine; the target's engine may judge too, in its own batch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def first_token_probabilities(self, messages: Messages) -> Mapping[str, float]:
        """Probabilities of the likeliest first tokens."""
        tokenizer = self.engine.tokenizer
        # A judge that thinks first would neither say yes nor no.
        arguments = {"enable_thinking": False} if "enable_thinking" in tokenizer.template_variables else {}
        prompt = await asyncio.to_thread(tokenizer.chat_prompt, messages, None, arguments)
        if len(prompt) >= self.engine.context_length:
            raise ContextLengthError("the question to the judge is longer than its context")
        logprobs = await top_logprobs(self.engine, prompt)
        return _by_text((tokenizer.decode((token,)), logprob) for token, logprob in logprobs.items())


class RemoteJudge:
    """A judge behind an OpenAI-compatible `/chat/completions`; a `transport` replaces the network."""

    def __init__(self, remote: RemoteModel, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.server = Server(remote, "judge", transport)
        self._model = remote.model

    async def first_token_probabilities(self, messages: Messages) -> Mapping[str, float]:
        """Probabilities of the likeliest first tokens, of which servers give up to 20."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 20,
        }
        answer = await self.server.ask("/chat/completions", body)
        try:
            top: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return _by_text((entry["token"], entry["logprob"]) for entry in top)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineError("the judge's server gave no log-probabilities") from error


def _by_text(logprobs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Probabilities by text, which several tokens may have."""
    found: dict[str, float] = {}
    for text, logprob in logprobs:
        found[text] = found.get(text, 0.0) + math.exp(logprob)
    return found
