"""What an engine would write next, with probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing

from lookahead_agent.engines.protocol import Engine, Sampling

_COUNT = 20


async def top_logprobs(engine: Engine, prompt_ids: Sequence[int]) -> Mapping[int, float]:
    """Log-probabilities of the 20 likeliest next tokens by id; empty if the engine gives none.

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
