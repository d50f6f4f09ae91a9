"""Why two greedy replies differ: the target's log-probabilities at the first token where they do.

Greedy decoding takes the likeliest token, and rounding depends on the batch size and the number of cores. If the two
likeliest tokens are closer than that rounding, either may win, and the replies diverge from there. In float32
(`engine_args={"dtype": "float32"}`) such ties practically never occur. On a GPU, `VLLM_BATCH_INVARIANT=1` makes vLLM's
rounding independent of the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from langchain_core.messages import HumanMessage

from lookahead_agent.chat.messages import template_messages
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines.protocol import top_logprobs
from lookahead_agent.policy import as_policy
from lookahead_agent.system import background


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token where two replies differ; None if they are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def gap_in_nats(model: ChatLookahead, question: str, first: Sequence[int], second: Sequence[int]) -> float:
    """The target's log-probability gap between the tokens of two replies where they first differ.

    Args:
        model: The chat model that generated both.
        question: The prompt of both.
        first: Token ids of one reply.
        second: Token ids of the other reply, which differs.

    Returns:
        Absolute difference of the two log-probabilities in nats; infinite if one token is not among the top 20, which
        rounding cannot explain.
    """
    return background.run(_gap(model, question, first, second))


async def _gap(model: ChatLookahead, question: str, first: Sequence[int], second: Sequence[int]) -> float:
    at = first_difference(first, second)
    if at is None or at >= min(len(first), len(second)):
        return float("inf")
    async with model.backend.engines(as_policy("off")) as engines:
        messages = template_messages([HumanMessage(question)])
        prompt = await asyncio.to_thread(engines.target.tokenizer.chat_prompt, messages)
        logprobs = await top_logprobs(engines.target, [*prompt, *first[:at]])
    if first[at] in logprobs and second[at] in logprobs:
        return abs(logprobs[first[at]] - logprobs[second[at]])
    return float("inf")
