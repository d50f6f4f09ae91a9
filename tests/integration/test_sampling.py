"""Sampled replies have the target's distribution, under `exact` and with draft tokens.

The vocabulary is so small that the distribution of whole replies is computed from the target's weights.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare

from lookahead_agent import ChatLookahead, VerifierPolicy
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import make_small_vocabulary_pair

QUESTION = "ab?"
MAX_TOKENS = 4
REPLIES = 640
BATCH = 64
# A correct decoder fails one comparison in ten thousand.
SIGNIFICANT = 1e-4


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a pair with a vocabulary of eight tokens."""
    return make_small_vocabulary_pair(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def small(small_pair: tuple[Path, Path]) -> Iterator[ChatLookahead]:
    """The small pair without token speculation."""
    target, draft = small_pair
    with ChatLookahead(
        model=str(target),
        draft_model=str(draft),
        policy="exact",
        token_speculation="none",
        temperature=1,
        max_tokens=MAX_TOKENS,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
    ) as llm:
        yield llm


def one_token_steps(**fields: Any) -> VerifierPolicy:
    """A policy under which nearly every token is a step, so that draft and target often agree."""
    # Synchronous, so that the target waits for a draft that is as slow as itself.
    return VerifierPolicy(delimiter=re.compile("[abc?]"), synchronous=True, **fields)


async def replies(llm: ChatLookahead, policy: str | VerifierPolicy) -> tuple[Counter[tuple[int, ...]], float]:
    """The count of each reply, and the share of steps that are accepted draft steps."""
    counts: Counter[tuple[int, ...]] = Counter()
    steps = accepted = 0
    for _ in range(REPLIES // BATCH):
        for message in await asyncio.gather(*(llm.ainvoke(QUESTION, policy=policy) for _ in range(BATCH))):
            counts[tuple(message.response_metadata["token_ids"])] += 1
            steps += message.response_metadata["lookahead"]["steps"]
            accepted += message.response_metadata["lookahead"]["accepted"]
    return counts, accepted / steps


def distribution(folder: Path, temperature: float, top_k: int, top_p: float) -> dict[tuple[int, ...], float]:
    """The probability of each reply of a model, whose vocabulary must be tiny."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    ended: dict[tuple[int, ...], float] = {}
    running: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(MAX_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *reply] for reply in running])).logits[:, -1].double()
        sorted_probabilities, tokens = torch.softmax(logits / temperature, dim=1).sort(dim=1, descending=True)
        kept = sorted_probabilities[:, :top_k] / sorted_probabilities[:, :top_k].sum(dim=1, keepdim=True)
        kept *= kept.cumsum(dim=1) - kept < top_p
        kept /= kept.sum(dim=1, keepdim=True)
        longer: dict[tuple[int, ...], float] = {}
        for (reply, probability), row, row_tokens in zip(running.items(), kept.tolist(), tokens.tolist(), strict=True):
            for token, share in zip(row_tokens, row, strict=False):
                if share:
                    (ended if token == tokenizer.eos_token_id else longer)[(*reply, token)] = probability * share
        running = longer
    return ended | running


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """p-value of the hypothesis that replies have a distribution; rare ones are pooled by their first tokens."""
    assert counts.keys() <= expected.keys(), "the target generates no such reply"
    beginnings: Counter[tuple[int, ...]] = Counter()
    for reply, probability in expected.items():
        for length in range(len(reply) + 1):
            beginnings[reply[:length]] += probability * counts.total()  # type: ignore[assignment]
    observed_cells: Counter[tuple[int, ...]] = Counter()
    expected_cells: Counter[tuple[int, ...]] = Counter()
    for reply, probability in expected.items():
        cell = next(reply[:length] for length in range(len(reply), -1, -1) if beginnings[reply[:length]] >= 10)
        observed_cells[cell] += counts[reply]
        expected_cells[cell] += probability * counts.total()  # type: ignore[assignment]
    for cell in [cell for cell, number in expected_cells.items() if number < 5]:
        for cells in (observed_cells, expected_cells):
            cells[()] += cells.pop(cell)
    cells = [cell for cell, number in expected_cells.items() if number > 0]
    return float(chisquare([observed_cells[cell] for cell in cells], [expected_cells[cell] for cell in cells]).pvalue)


@pytest.fixture(scope="module")
def expected(small_pair: tuple[Path, Path]) -> dict[tuple[int, ...], float]:
    """The probability of each reply of the target at temperature 1."""
    return distribution(small_pair[0], temperature=1.0, top_k=8, top_p=1.0)


@pytest.mark.timeout(1200)
async def test_exact_keeps_the_target_distribution(
    small: ChatLookahead, expected: dict[tuple[int, ...], float]
) -> None:
    shapes: list[dict[str, Any]] = [{}, {"width": 2, "depth": 2}]
    for shape in shapes:
        exact, accepted = await replies(small, one_token_steps(verifier="exact", **shape))
        assert accepted > 0.02, "some draft steps are accepted"
        assert len(exact) > 50
        assert p_value(exact, expected) > SIGNIFICANT, shape


@pytest.mark.timeout(1200)
async def test_p_value_detects_another_distribution(
    small: ChatLookahead, expected: dict[tuple[int, ...], float]
) -> None:
    """A verifier that accepts every step mixes in the draft's distribution."""
    mixed, accepted = await replies(small, one_token_steps(verifier="random", probability=1.0))
    assert accepted > 0.1
    assert p_value(mixed, expected) < SIGNIFICANT


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["draft_model", "shared_draft"])
async def test_draft_tokens_keep_the_target_distribution(
    small: ChatLookahead, small_pair: tuple[Path, Path], method: str
) -> None:
    """Samples with temperature, top-k and top-p, as vendors recommend."""
    sampling: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "top_p": 0.9}
    with ChatLookahead(
        model=str(small_pair[0]),
        draft_model=str(small_pair[1]),
        policy="off",
        token_speculation=method if method == "shared_draft" else {"method": method, "num_speculative_tokens": 2},
        max_tokens=MAX_TOKENS,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
        **sampling,
    ) as llm:
        speculative, _ = await replies(llm, "off")
        assert await forward_passes(llm) < MAX_TOKENS, "draft tokens were accepted"
    assert len(speculative) > 20
    assert p_value(speculative, distribution(small_pair[0], **sampling)) > SIGNIFICANT


async def forward_passes(llm: ChatLookahead) -> float:
    """Mean of the target's forward passes per reply; without accepted draft tokens, each token takes one."""
    reported = [
        (await llm.ainvoke(QUESTION)).response_metadata["lookahead"]["target_forward_passes"] for _ in range(40)
    ]
    return sum(reported) / len(reported)
