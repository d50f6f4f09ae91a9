"""The engine interface: how the decoder gets tokens."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lookahead_agent.engines.shared_draft import BufferLines
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.errors import ContextLengthError, EngineError

_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters and stop conditions of a request."""

    max_tokens: int  # maximum number of tokens to generate, at least 1
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # probability mass of nucleus sampling, in (0, 1]
    top_k: int = 0  # number of most likely tokens to sample from; 0: all
    seed: int | None = None  # makes the sampling of one prompt reproducible
    stop: tuple[str, ...] = ()  # strings that end the generation
    logprobs: int | None = None  # number of most likely tokens to return with log-probabilities; None: none
    allowed_token_ids: tuple[int, ...] | None = None  # the only tokens that may be generated; None: all
    # Whether the first delta has the log-probabilities of the prompt's tokens. vLLM then reads nothing from the prefix
    # cache.
    prompt_logprobs: bool = False
    # Constraint on the whole output, `{"json": schema}` or `{"json_object": True}`; None: free text
    structured: Mapping[str, Any] | None = None
    # Requests of one salt share the prefix cache with each other only, so that no client sees by `cached_tokens` what
    # another one asked; None: requests without a salt share it
    cache_salt: str | None = None
    drafted: bool = True  # whether a pausable draft model inside the engine reads the prompt and proposes tokens
    in_reply: bool = False  # whether the reply has tokens already, so that it waits for a server that is away

    @property
    def is_seeded(self) -> bool:
        """Whether a seed fixes the random numbers; draft tokens would change them, so such a request gets none."""
        return self.seed is not None and self.temperature > 0


@dataclass(frozen=True)
class Delta:
    """The tokens that were generated since the last delta."""

    token_ids: tuple[int, ...]
    # Log-probabilities of the most likely tokens by id, for each token, if requested
    logprobs: tuple[Mapping[int, float], ...] | None = None
    finish_reason: str | None = None  # "stop" or "length" in the last delta, else None
    # Log-probability of each token of the prompt in nats, if requested; None for the first, which has no prefix
    prompt_logprobs: tuple[float | None, ...] | None = None
    # The number of prompt tokens from the engine's prefix cache, in one of the deltas; None in the others, and if a
    # server does not report it
    cached_tokens: int | None = None
    # Draft tokens that the request's token speculation proposed, and those that the target accepted; in the last delta,
    # None if the engine does not count them
    proposals: tuple[int, int] | None = None
    resumptions: int = 0  # how often the engine failed and the generation went on, since the last delta


class Engine(Protocol):
    """Generates tokens from a prompt of tokens."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of prompt and reply together."""

    @property
    def in_flight(self) -> int:
        """The number of running requests."""

    @property
    def healthy(self) -> bool:
        """Whether the engine can generate, as far as is known without a request."""

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Generate from a prompt of token ids, shape (n,), and stream the deltas.

        Closing the generator, or cancelling the task that reads it, aborts the request.

        Raises:
            EngineError: The engine failed.
        """

    def close(self) -> None:
        """Shut down; every running request fails. May be called again."""


@runtime_checkable
class SupportsSharedDraft(Protocol):
    """An engine that can verify another engine's draft tokens, which cost no extra model time."""

    @property
    def shared_draft(self) -> bool:
        """Whether the engine was started with a shared draft."""

    def draft_lines(self, prompt_ids: Sequence[int]) -> BufferLines:
        """The lines to which a draft writes its tokens of one reply, given the prompt in token ids, shape (n,)."""


def room_for_reply(model: str, context_length: int, prompt_ids: Sequence[int]) -> int:
    """The maximum number of reply tokens that fit into the context; raises ContextLengthError if none does."""
    if (room := context_length - len(prompt_ids)) < 1:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens and the context of {model} {context_length}: shorten the prompt "
            "or raise max_model_len"
        )
    return room


async def top_logprobs(engine: Engine, prompt_ids: Sequence[int], cache_salt: str | None = None) -> Mapping[int, float]:
    """Return the log-probabilities, in nats, of the 20 most likely next tokens by id; empty if the engine has none.

    Raises:
        EngineError: The engine failed.
    """
    sampling = Sampling(max_tokens=1, logprobs=_TOP_LOGPROBS, cache_salt=cache_salt)
    delta = await _first_logprobs(engine, prompt_ids, sampling)
    return delta.logprobs[0] if delta is not None and delta.logprobs else {}


async def sequence_logprobs(
    engine: Engine, prefix_ids: Sequence[int], token_ids: Sequence[int], cache_salt: str | None = None
) -> list[float]:
    """Return the log-probability of each token of a continuation, in nats: one prefill, no decoding.

    Args:
        engine: The engine that scores the continuation.
        prefix_ids: Token ids of the prefix, shape (n,), n ≥ 1.
        token_ids: Token ids of the continuation, shape (m,).
        cache_salt: The cache salt of the reply that the continuation belongs to.

    Raises:
        EngineError: The engine failed, or returned no log-probabilities.
    """
    # vLLM reads nothing from its prefix cache for such a request, and still writes the prompt into it.
    sampling = Sampling(max_tokens=1, prompt_logprobs=True, cache_salt=cache_salt)
    delta = await _first_logprobs(engine, (*prefix_ids, *token_ids), sampling)
    if delta is None or delta.prompt_logprobs is None:
        raise EngineError("the engine gave no log-probabilities of its prompt")
    return [value for value in delta.prompt_logprobs[len(prefix_ids) :] if value is not None]


async def _first_logprobs(engine: Engine, prompt_ids: Sequence[int], sampling: Sampling) -> Delta | None:
    """The first delta that has log-probabilities; None if there is none."""
    async with aclosing(engine.generate(prompt_ids, sampling)) as deltas:
        async for delta in deltas:
            if delta.logprobs or delta.prompt_logprobs is not None:
                return delta
    return None
