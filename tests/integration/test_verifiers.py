"""Verifiers on real models: batched embeddings, and the target's scores."""

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


async def test_concurrent_similarities_are_computed_in_batches() -> None:
    embedder = SentenceEmbedder(await asyncio.to_thread(fetch, MINILM))
    pairs = [("We add two and three.", f"We add {number} apples.") for number in range(24)]
    one_by_one = [await embedder.similarity(*pair) for pair in pairs[:3]]
    before = embedder.batches
    together = await asyncio.gather(*(embedder.similarity(*pair) for pair in pairs))
    assert embedder.batches - before < 6
    assert together[:3] == pytest.approx(one_by_one, abs=1e-4)
    assert await embedder.similarity("It is 4.", "It is 4.") == pytest.approx(1, abs=1e-4)


async def test_embedding_does_not_block_the_event_loop() -> None:
    embedder = SentenceEmbedder(await asyncio.to_thread(fetch, MINILM))
    task = asyncio.create_task(embedder.similarity("a " * 2000, "b " * 2000))
    wakeups = 0
    while not task.done():
        await asyncio.sleep(0.001)
        wakeups += 1
    assert wakeups > 1


def test_folder_without_a_model_raises_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a sentence-transformers model"):
        SentenceEmbedder(tmp_path)


@pytest.mark.timeout(1200)
def test_score_verifier_accepts_draft_steps(real: ChatLookahead) -> None:
    """`test_draft_verifiers.py` tests the verifiers for which the text does not matter."""
    metadata = real.invoke(PROBLEMS[0], policy="score:score=0", max_tokens=64).response_metadata["lookahead"]
    assert metadata["speculation_disabled"] is None
    assert metadata["accepted"] > 0
    assert metadata["judge_calls"] >= metadata["accepted"]
    with_defaults = real.invoke(PROBLEMS[0], policy="score:depth=1", max_tokens=16)
    assert with_defaults.response_metadata["lookahead"]["speculation_disabled"] is None
