"""What the decoder needs from a place where tokens come from."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lookahead_agent.engines.shared_draft import BufferLines
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.errors import EngineError

_LIKELIEST = 20


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when generation ends.

    Attributes:
        max_tokens: Most tokens to generate, at least 1.
        temperature: 0 takes the likeliest token.
        top_p: Probability mass that is sampled from, in (0, 1].
        top_k: Number of likeliest tokens that are sampled from; 0: all.
        seed: Makes sampling repeatable for one prompt.
        stop: Texts that end the generation.
        logprobs: How many of the likeliest tokens come with their log-probabilities; None: none.
        allowed_token_ids: The only tokens that may be generated; None: all.
        prompt_logprobs: Whether the first delta tells the log-probabilities of the prompt's own tokens. vLLM computes
            the whole prompt anew for that: it reads nothing from the prefix cache.
        structured: Constraint on the whole output, `{"json": schema}` or `{"json_object": True}`; None: free text.
        drafted: Whether a draft model inside the engine that may pause reads the prompt and proposes draft tokens.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: bool = False
    structured: Mapping[str, Any] | None = None
    drafted: bool = True

    @property
    def seeded(self) -> bool:
        """Whether a seed fixes the random numbers, which draft tokens would change: such a request gets none."""
        return self.seed is not None and self.temperature > 0


@dataclass(frozen=True)
class Delta:
    """Tokens that were generated since the last delta.

    Attributes:
        token_ids: The new tokens.
        logprobs: For each of them the log-probabilities of the likeliest tokens by id, if asked for.
        finish_reason: "stop" or "length" in the last delta, else None.
        prompt_logprobs: Of each token of the prompt, in nats, if asked for; None for the first, which nothing precedes.
        cached_tokens: How many tokens of the prompt came from the engine's prefix cache, in one of the deltas; None in
            the others, and where a server does not tell.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...] | None = None
    finish_reason: str | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    cached_tokens: int | None = None


class Engine(Protocol):
    """Generates tokens from tokens."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and reply together."""

    @property
    def in_flight(self) -> int:
        """Requests that are running."""

    @property
    def healthy(self) -> bool:
        """Whether it can generate, as far as one knows without asking it."""

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Generate from a prompt of token ids, shape (n,), streaming what comes.

        Closing the generator, or cancelling the task that reads it, aborts the request.

        Raises:
            EngineError: The engine failed.
        """

    def close(self) -> None:
        """Shut down; every running request fails. May be called again."""


@runtime_checkable
class SupportsSharedDraft(Protocol):
    """An engine that can verify draft tokens that another engine writes for it, which costs no time of a model."""

    @property
    def shared_draft(self) -> bool:
        """Whether it was started to do so."""

    def draft_lines(self, prompt_ids: Sequence[int]) -> BufferLines:
        """Where a draft shows its tokens of one reply, by the reply's prompt in token ids, shape (n,)."""


async def top_logprobs(engine: Engine, prompt_ids: Sequence[int]) -> Mapping[int, float]:
    """Log-probabilities, in nats, of the 20 likeliest next tokens by id; empty if the engine gives none.

    Raises:
        EngineError: The engine failed.
    """
    sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=_LIKELIEST)
    async with aclosing(engine.generate(prompt_ids, sampling)) as deltas:
        async for delta in deltas:
            if delta.logprobs:
                return delta.logprobs[0]
    return {}


async def sequence_logprobs(engine: Engine, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """The log-probability of each token of a continuation, in nats: one prefill, no decoding.

    Args:
        engine: The model that is asked.
        prefix_ids: Token ids of what precedes, shape (n,), n ≥ 1.
        token_ids: Token ids of the continuation, shape (m,).

    Raises:
        EngineError: The engine failed, or gives no log-probabilities.
    """
    sampling = Sampling(max_tokens=1, prompt_logprobs=True)
    async with aclosing(engine.generate((*prefix_ids, *token_ids), sampling)) as deltas:
        async for delta in deltas:
            if delta.prompt_logprobs is not None:
                return [value for value in delta.prompt_logprobs[len(prefix_ids) :] if value is not None]
    raise EngineError("the engine gave no log-probabilities of its prompt")
