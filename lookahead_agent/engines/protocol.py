"""What the decoder needs from a place where tokens come from."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lookahead_agent.engines.shared_draft import BufferLines
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.errors import ContextLengthError, EngineError

_LIKELIEST = 20


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when generation ends."""

    max_tokens: int  # most tokens to generate, at least 1
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # probability mass that is sampled from, in (0, 1]
    top_k: int = 0  # number of likeliest tokens that are sampled from; 0: all
    seed: int | None = None  # makes sampling repeatable for one prompt
    stop: tuple[str, ...] = ()  # texts that end the generation
    logprobs: int | None = None  # how many of the likeliest tokens come with their log-probabilities; None: none
    allowed_token_ids: tuple[int, ...] | None = None  # the only tokens that may be generated; None: all
    # Whether the first delta tells the log-probabilities of the prompt's own tokens. vLLM reads nothing from the prefix
    # cache then.
    prompt_logprobs: bool = False
    # Constraint on the whole output, `{"json": schema}` or `{"json_object": True}`; None: free text
    structured: Mapping[str, Any] | None = None
    drafted: bool = True  # whether a draft model inside the engine that may pause reads the prompt and proposes tokens

    @property
    def seeded(self) -> bool:
        """Whether a seed fixes the random numbers, which draft tokens would change: such a request gets none."""
        return self.seed is not None and self.temperature > 0


@dataclass(frozen=True)
class Delta:
    """Tokens that were generated since the last delta."""

    token_ids: tuple[int, ...]
    # For each of them the log-probabilities of the likeliest tokens by id, if asked for
    logprobs: tuple[Mapping[int, float], ...] | None = None
    finish_reason: str | None = None  # "stop" or "length" in the last delta, else None
    # Of each token of the prompt, in nats, if asked for; None for the first, which nothing precedes
    prompt_logprobs: tuple[float | None, ...] | None = None
    # How many tokens of the prompt came from the engine's prefix cache, in one of the deltas; None in the others, and
    # where a server does not tell
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


def room_for_reply(model: str, context_length: int, prompt_ids: Sequence[int]) -> int:
    """Most tokens of a reply to a prompt in a context of so many; raises ContextLengthError if there are none."""
    if (room := context_length - len(prompt_ids)) < 1:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens and the context of {model} {context_length}: shorten the prompt "
            "or raise max_model_len"
        )
    return room


async def top_logprobs(engine: Engine, prompt_ids: Sequence[int]) -> Mapping[int, float]:
    """Log-probabilities, in nats, of the 20 likeliest next tokens by id; empty if the engine gives none.

    Raises:
        EngineError: The engine failed.
    """
    delta = await _first(engine, prompt_ids, Sampling(max_tokens=1, logprobs=_LIKELIEST))
    return delta.logprobs[0] if delta is not None and delta.logprobs else {}


async def sequence_logprobs(engine: Engine, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """The log-probability of each token of a continuation, in nats: one prefill, no decoding.

    Args:
        engine: The model that is asked.
        prefix_ids: Token ids of what precedes, shape (n,), n ≥ 1.
        token_ids: Token ids of the continuation, shape (m,).

    Raises:
        EngineError: The engine failed, or gives no log-probabilities.
    """
    delta = await _first(engine, (*prefix_ids, *token_ids), Sampling(max_tokens=1, prompt_logprobs=True))
    if delta is None or delta.prompt_logprobs is None:
        raise EngineError("the engine gave no log-probabilities of its prompt")
    return [value for value in delta.prompt_logprobs[len(prefix_ids) :] if value is not None]


async def _first(engine: Engine, prompt_ids: Sequence[int], sampling: Sampling) -> Delta | None:
    """The first delta that has log-probabilities."""
    async with aclosing(engine.generate(prompt_ids, sampling)) as deltas:
        async for delta in deltas:
            if delta.logprobs or delta.prompt_logprobs is not None:
                return delta
    return None
