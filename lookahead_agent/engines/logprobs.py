"""Log-probabilities that an engine gives: of its next token, and of a text that is there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing

from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.errors import EngineError

_COUNT = 20


async def top_logprobs(engine: Engine, prompt_ids: Sequence[int]) -> Mapping[int, float]:
    """Log-probabilities, in nats, of the 20 likeliest next tokens by id; empty if the engine gives none.

    Args:
        engine: The model that is asked.
        prompt_ids: Token ids of what precedes, shape (n,).

    Raises:
        EngineError: The engine failed.
    """
    sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=_COUNT)
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
