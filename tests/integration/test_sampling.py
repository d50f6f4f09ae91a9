"""Sampled replies have the target's distribution, under `exact` and with draft tokens."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2_contingency

from lookahead_agent import ChatLookahead, VerifierPolicy
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import make_small_vocabulary_pair

REPLIES = 1216
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
        max_tokens=4,
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
        for message in await asyncio.gather(*(llm.ainvoke("ab?", policy=policy) for _ in range(BATCH))):
            counts[tuple(message.response_metadata["token_ids"])] += 1
            steps += message.response_metadata["lookahead"]["steps"]
            accepted += message.response_metadata["lookahead"]["accepted"]
    return counts, accepted / steps


def p_value(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
    """p-value of the hypothesis that both come from one distribution; rare replies are pooled."""
    common = [reply for reply in first | second if first[reply] + second[reply] >= 10]
    table = [[counts[reply] for reply in common] for counts in (first, second)]
    for row, counts in zip(table, (first, second), strict=True):
        row.append(counts.total() - sum(row))
    columns = [column for column in zip(*table, strict=True) if sum(column)]
    return float(chi2_contingency(list(zip(*columns, strict=True))).pvalue)


@pytest.fixture(scope="module")
def expected(small: ChatLookahead) -> Counter[tuple[int, ...]]:
    """The count of each reply of the target without speculation."""
    counts, _ = asyncio.run(replies(small, "off"))
    return counts


@pytest.mark.timeout(1200)
async def test_exact_keeps_the_target_distribution(small: ChatLookahead, expected: Counter[tuple[int, ...]]) -> None:
    shapes: list[dict[str, Any]] = [{}, {"width": 2, "depth": 2}]
    for shape in shapes:
        exact, accepted = await replies(small, one_token_steps(verifier="exact", **shape))
        assert accepted > 0.02, "some draft steps are accepted"
        assert len(exact) > 50
        assert p_value(expected, exact) > SIGNIFICANT, shape


@pytest.mark.timeout(1200)
async def test_p_value_detects_another_distribution(small: ChatLookahead, expected: Counter[tuple[int, ...]]) -> None:
    """A verifier that accepts every step mixes in the draft's distribution."""
    mixed, accepted = await replies(small, one_token_steps(verifier="random", probability=1.0))
    assert accepted > 0.1
    assert p_value(expected, mixed) < SIGNIFICANT


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["draft_model", "shared_draft"])
async def test_draft_tokens_keep_the_target_distribution(
    small: ChatLookahead, small_pair: tuple[Path, Path], method: str
) -> None:
    """Samples with temperature, top-k and top-p, as vendors recommend."""
    sampling = {"temperature": 0.7, "top_k": 6, "top_p": 0.9}
    baseline, _ = await replies(small.model_copy(update=sampling), "off")
    with ChatLookahead(
        model=str(small_pair[0]),
        draft_model=str(small_pair[1]),
        policy="off",
        token_speculation=method if method == "shared_draft" else {"method": method, "num_speculative_tokens": 2},
        max_tokens=4,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
        **sampling,
    ) as llm:
        speculative, _ = await replies(llm, "off")
        assert await forward_passes(llm) < 4, "draft tokens were accepted"
    assert len(speculative) > 20
    assert p_value(baseline, speculative) > SIGNIFICANT


async def forward_passes(llm: ChatLookahead) -> float:
    """Mean of the target's forward passes per reply; without accepted draft tokens, each token takes one."""
    reported = [(await llm.ainvoke("ab?")).response_metadata["lookahead"]["target_forward_passes"] for _ in range(40)]
    return sum(reported) / len(reported)
