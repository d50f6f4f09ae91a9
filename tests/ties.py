"""Why two greedy replies differ: the target's log-probabilities at the first token where they do.

Greedy decoding takes the likeliest token, and a batch of another size (or another number of cores) rounds in another
way. Where the two likeliest tokens are closer than that rounding, either may win, and from there on the replies differ.
In float32 (`engine_args={"dtype": "float32"}`) such ties are practically gone; on a GPU, `VLLM_BATCH_INVARIANT=1` makes
vLLM's rounding independent of the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from langchain_core.messages import HumanMessage

from lookahead_agent.chat.messages import template_messages
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines import background
from lookahead_agent.engines.protocol import top_logprobs
from lookahead_agent.policy import as_policy


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token in which two replies differ; None if they are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def gap_in_nats(model: ChatLookahead, question: str, first: Sequence[int], second: Sequence[int]) -> float:
    """How much likelier the target finds one reply's token than the other's where they first differ.

    Args:
        model: The chat model that wrote both.
        question: What was asked.
        first: Token ids of one reply.
        second: Token ids of another, different one.

    Returns:
        Absolute difference of the two log-probabilities in nats; infinite if one token is not among the likeliest 20,
        which no rounding explains.
    """
    return background.run(_gap(model, question, first, second))


async def _gap(model: ChatLookahead, question: str, first: Sequence[int], second: Sequence[int]) -> float:
    at = first_difference(first, second)
    if at is None or at >= min(len(first), len(second)):
        return float("inf")
    async with model.backend.engines(as_policy("off")) as engines:
        messages = template_messages([HumanMessage(question)])
        prompt = await asyncio.to_thread(engines.target.tokenizer.chat_prompt, messages)
        values = await top_logprobs(engines.target, [*prompt, *first[:at]])
    if first[at] in values and second[at] in values:
        return abs(values[first[at]] - values[second[at]])
    return float("inf")
