"""`exact` is lossless on real vLLM: two hundred prompts at every depth, each at one of two widths, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from langchain_core.messages import AIMessage

from lookahead_agent import ChatLookahead, VerifierPolicy
from lookahead_agent.policy import as_policy
from tests.integration.tiny_models import questions

QUESTIONS = questions(200, seed=11)
BATCH = 20


async def replies(llm: ChatLookahead, policy: VerifierPolicy, questions: Sequence[str]) -> list[AIMessage]:
    messages: list[AIMessage] = []
    for start in range(0, len(questions), BATCH):
        group = questions[start : start + BATCH]
        messages += await asyncio.gather(*(llm.ainvoke(question, policy=policy, max_tokens=40) for question in group))
    return messages


def tokens(messages: Sequence[AIMessage]) -> list[list[int]]:
    return [message.response_metadata["token_ids"] for message in messages]


@pytest.fixture(scope="module")
def target_tokens(tiny: ChatLookahead) -> list[list[int]]:
    """Replies of the target without speculation."""
    return tokens(asyncio.run(replies(tiny, as_policy("off"), QUESTIONS)))


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
async def test_exact_is_lossless(tiny: ChatLookahead, target_tokens: list[list[int]], depth: int, width: int) -> None:
    half = slice(width - 1, None, 2)
    messages = await replies(tiny, as_policy(f"exact:depth={depth}:width={width}"), QUESTIONS[half])
    compared = zip(QUESTIONS[half], target_tokens[half], tokens(messages), strict=True)
    assert not [question for question, expected, found in compared if found != expected]
    # A draft as large as its target may be late for every step, above all at depth 1. On any machine it writes tokens.
    metadata = [message.response_metadata["lookahead"] for message in messages]
    assert sum(sum(entry["tokens"]["draft"].values()) for entry in metadata) > 0


async def test_synchronous_exact_is_lossless(tiny: ChatLookahead, target_tokens: list[list[int]]) -> None:
    half = slice(0, None, 2)
    messages = await replies(tiny, as_policy("exact:synchronous=true:width=2"), QUESTIONS[half])
    assert tokens(messages) == target_tokens[half]
    # The synchronous target waits for its draft, so many draft steps are accepted.
    assert sum(message.response_metadata["lookahead"]["accepted"] for message in messages) > len(messages)
