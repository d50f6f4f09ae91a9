"""Language models as judges: p(yes) comes from log-probabilities, so that strictness is a threshold."""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from lookahead_agent.decoding.foreign import call_part
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines.protocol import Engine, top_logprobs
from lookahead_agent.engines.servers import RemoteModel, Server
from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError

SYSTEM_PROMPT = (
    "You compare two versions of the next step of a solution. They are equivalent if they say the same thing and "
    "reach the same results, whatever the wording. They are not if a number, a formula, a claim or a conclusion "
    "differs. Answer with one word: yes or no."
)
USER_PROMPT = (
    "Question:\n{question}\n\nVersion A:\n{target}\n\nVersion B:\n{draft}\n\nAre the two versions equivalent? "
    "Answer yes or no."
)
_QUESTION_TAIL = 600  # characters kept from the question's end if the pair exceeds the judge's context

JudgeMessages = Sequence[Mapping[str, str]]


class JudgeModel(Protocol):
    """A chat model that answers with one token."""

    async def first_token_probabilities(
        self, messages: JudgeMessages, cache_salt: str | None = None
    ) -> Mapping[str, float]:
        """Return the probabilities of the likeliest first tokens of an answer, by text.

        Prompts of different cache salts may not share a prefix cache.
        """


@dataclass(frozen=True)
class JudgeVerifier:
    """Asks a model whether two steps mean the same: the paper's verifier (section 3.2).

    p(aligned) is p(yes) / (p(yes) + p(no)) over the answer's first token. If the pair exceeds the judge's context, only
    the question's end is kept. If the steps alone exceed it, the pair is rejected.
    """

    model: JudgeModel
    threshold: float  # least p(aligned) of an accepted pair, in [0, 1]
    # Whether an accepted pair is judged again with the two steps exchanged, and the lower p(aligned) decides: small
    # judges have a position bias.
    both_orders: bool = False

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        try:
            aligned, calls = await self.p_aligned(pair), 1
            if self.both_orders and aligned >= self.threshold:
                aligned, calls = min(aligned, await self.p_aligned(pair.swap())), 2
        except ContextLengthError:
            return Verdict(False, "too long for the judge")
        return Verdict(aligned >= self.threshold, "judge", aligned, judge_calls=calls)

    async def p_aligned(self, pair: StepPair) -> float:
        """Return p(aligned), in [0, 1]; EngineError if the judge answers neither yes nor no."""
        try:
            answers = await self._ask(pair, pair.question)
        except ContextLengthError:
            end = pair.question[-_QUESTION_TAIL:]
            question = end if end == pair.question else f"…{end}"
            answers = await self._ask(pair, question)
        yes, no = (sum(p for text, p in answers.items() if text.strip().lower() == word) for word in ("yes", "no"))
        if yes + no == 0.0:
            raise EngineError("the judge answered neither yes nor no")
        return yes / (yes + no)

    async def _ask(self, pair: StepPair, question: str) -> Mapping[str, float]:
        messages = _messages(pair, question)
        return await call_part(self.model, lambda: self.model.first_token_probabilities(messages, pair.cache_salt))


def _messages(pair: StepPair, question: str) -> JudgeMessages:
    user = USER_PROMPT.format(question=question, target=pair.target.text.strip(), draft=pair.draft.text.strip())
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": user}]


class EngineJudge:
    """A judge on an engine; on the target's engine, its requests join the target's batch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def first_token_probabilities(
        self, messages: JudgeMessages, cache_salt: str | None = None
    ) -> Mapping[str, float]:
        """Return the probabilities of the likeliest first tokens, by text."""
        tokenizer = self.engine.tokenizer
        # The first token of a judge that thinks would be neither yes nor no.
        arguments = {"enable_thinking": False} if "enable_thinking" in tokenizer.template_variables else {}
        prompt = await asyncio.to_thread(tokenizer.chat_prompt, messages, None, arguments)
        if len(prompt) >= self.engine.context_length:
            raise ContextLengthError("the question to the judge is longer than its context")
        logprobs = await top_logprobs(self.engine, prompt, cache_salt)
        return _by_text((tokenizer.decode((token,)), logprob) for token, logprob in logprobs.items())


class RemoteJudge:
    """A judge behind an OpenAI-compatible `/chat/completions`; a `transport` replaces the network."""

    def __init__(self, remote: RemoteModel, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.server = Server(remote, "judge", transport)
        self._model = remote.model
        self._accepts_salt = True

    async def first_token_probabilities(
        self, messages: JudgeMessages, cache_salt: str | None = None
    ) -> Mapping[str, float]:
        """Return the probabilities of the likeliest first tokens, by text; servers give up to 20."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 20,
        }
        answer = await self._ask(body, cache_salt)
        try:
            top: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return _by_text((str(entry["token"]), entry["logprob"]) for entry in top)
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            raise EngineError("the judge's server gave no log-probabilities") from error

    async def _ask(self, body: Mapping[str, Any], cache_salt: str | None) -> Any:
        path = "/chat/completions"
        if cache_salt is None or not self._accepts_salt:
            return await self.server.ask(path, body)
        try:
            return await self.server.ask(path, {**body, "cache_salt": cache_salt})
        except ContextLengthError:
            raise
        except ConfigurationError:  # some servers reject unknown parameters
            answer = await self.server.ask(path, body)
        self._accepts_salt = False
        return answer


def _by_text(logprobs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Add up probabilities by text, which several tokens may share."""
    found: dict[str, float] = {}
    for text, logprob in logprobs:
        found[text] = found.get(text, 0.0) + math.exp(logprob)
    return found
