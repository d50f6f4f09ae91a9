"""Verifiers on real models: embeddings in batches, the target's marks and likelihoods."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.errors import ModelError
from lookahead_agent.models.catalogue import MINILM
from lookahead_agent.models.resolve import fetch
from lookahead_agent.verifiers.embedding import SentenceEmbedder
from tests.integration.test_real_pair import PROBLEMS


async def test_pairs_asked_about_at_once_are_computed_together() -> None:
    embedder = SentenceEmbedder(await asyncio.to_thread(fetch, MINILM))
    pairs = [("We add two and three.", f"We add {number} apples.") for number in range(24)]
    one_by_one = [await embedder.similarity(*pair) for pair in pairs[:3]]
    before = embedder.batches
    together = await asyncio.gather(*(embedder.similarity(*pair) for pair in pairs))
    assert embedder.batches - before < 6
    assert together[:3] == pytest.approx(one_by_one, abs=1e-4)
    assert await embedder.similarity("It is 4.", "It is 4.") == pytest.approx(1, abs=1e-4)


async def test_the_event_loop_goes_on_while_it_computes() -> None:
    embedder = SentenceEmbedder(await asyncio.to_thread(fetch, MINILM))
    task = asyncio.create_task(embedder.similarity("a " * 2000, "b " * 2000))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 1


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a sentence-transformers model"):
        SentenceEmbedder(tmp_path)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", ["score:score=0", "likelihood:likelihood=-50"])
def test_draft_first_verifiers_leave_the_target_nothing_to_write(real: ChatLookahead, policy: str) -> None:
    figures = real.invoke(PROBLEMS[0], policy=policy, max_tokens=90).response_metadata["lookahead"]
    assert figures["speculation_disabled"] is None
    assert figures["accepted"] > 0
    assert figures["judge_calls"] >= figures["accepted"]
    refused = real.invoke(PROBLEMS[0], policy=policy.split(":")[0] + ":depth=1", max_tokens=60)
    assert refused.response_metadata["lookahead"]["speculation_disabled"] is None


@pytest.mark.timeout(1200)
def test_a_tree_on_the_real_pair(real: ChatLookahead) -> None:
    # Which steps mean the same is the models' affair: here every pair may stand.
    policy = "random:probability=1:width=2:depth=2"
    figures = real.invoke(PROBLEMS[0], policy=policy, max_tokens=90).response_metadata["lookahead"]
    assert figures["speculation_disabled"] is None
    assert figures["accepted"] > 0
    token_counts = figures["tokens"]["draft"]
    assert token_counts["rejected"] + token_counts["aborted"] > 0, "of two candidates one is dropped"
