"""Sampled replies are distributed as the target's own, under `exact` and with draft tokens."""

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
TOGETHER = 64
# A right decoder fails one run in ten thousand.
SIGNIFICANT = 1e-4


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a pair of models that know eight tokens."""
    return make_small_vocabulary_pair(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def small(small_pair: tuple[Path, Path]) -> Iterator[ChatLookahead]:
    """The pair, of which the target guesses no tokens."""
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


def steps_of_a_token(**fields: Any) -> VerifierPolicy:
    """A policy under which nearly every token is a step, so that draft and target often say the same."""
    # In rounds, so that the target waits for a draft that is no faster than itself.
    return VerifierPolicy(delimiter=re.compile("[abc?]"), synchronous=True, **fields)


async def replies(llm: ChatLookahead, policy: str | VerifierPolicy) -> tuple[Counter[tuple[int, ...]], float]:
    """How often each reply comes, and the share of its steps that are the draft's."""
    counted: Counter[tuple[int, ...]] = Counter()
    steps = accepted = 0
    for _ in range(REPLIES // TOGETHER):
        for message in await asyncio.gather(*(llm.ainvoke("ab?", policy=policy) for _ in range(TOGETHER))):
            counted[tuple(message.response_metadata["token_ids"])] += 1
            steps += message.response_metadata["lookahead"]["steps"]
            accepted += message.response_metadata["lookahead"]["accepted"]
    return counted, accepted / steps


def p_value(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
    """Of the hypothesis that both are drawn from one distribution; rare replies are counted together."""
    common = [reply for reply in first | second if first[reply] + second[reply] >= 10]
    table = [[counts[reply] for reply in common] for counts in (first, second)]
    for row, counts in zip(table, (first, second), strict=True):
        row.append(counts.total() - sum(row))
    columns = [column for column in zip(*table, strict=True) if sum(column)]
    return float(chi2_contingency(list(zip(*columns, strict=True))).pvalue)


@pytest.fixture(scope="module")
def alone(small: ChatLookahead) -> Counter[tuple[int, ...]]:
    """How often the target alone gives each reply."""
    counted, _ = asyncio.run(replies(small, "off"))
    return counted


@pytest.mark.timeout(1200)
async def test_exact_samples_as_the_target_alone(small: ChatLookahead, alone: Counter[tuple[int, ...]]) -> None:
    shapes: list[dict[str, Any]] = [{}, {"width": 2, "depth": 2}]
    for shape in shapes:
        ahead, accepted = await replies(small, steps_of_a_token(verifier="exact", **shape))
        assert accepted > 0.02, "there is something to get wrong"
        assert len(ahead) > 50
        assert p_value(alone, ahead) > SIGNIFICANT, shape


@pytest.mark.timeout(1200)
async def test_the_test_notices_another_distribution(small: ChatLookahead, alone: Counter[tuple[int, ...]]) -> None:
    """A verifier that accepts by chance lets the draft's distribution in."""
    mixed, accepted = await replies(small, steps_of_a_token(verifier="random", probability=1.0))
    assert accepted > 0.1
    assert p_value(alone, mixed) < SIGNIFICANT


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["draft_model", "shared_draft"])
async def test_guessed_tokens_change_no_distribution(
    small: ChatLookahead, small_pair: tuple[Path, Path], method: str
) -> None:
    """With all that makers recommend: a temperature, top-k and top-p."""
    chosen = {"temperature": 0.7, "top_k": 6, "top_p": 0.9}
    without, _ = await replies(small.model_copy(update=chosen), "off")
    with ChatLookahead(
        model=str(small_pair[0]),
        draft_model=str(small_pair[1]),
        policy="off",
        token_speculation=method if method == "shared_draft" else {"method": method, "num_speculative_tokens": 2},
        max_tokens=4,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
        **chosen,
    ) as llm:
        guessed, _ = await replies(llm, "off")
        assert await passes(llm) < 4, "tokens were guessed"
    assert len(guessed) > 20
    assert p_value(without, guessed) > SIGNIFICANT


async def passes(llm: ChatLookahead) -> float:
    """Of a reply on average; four tokens are four passes where none is guessed right."""
    reported = [(await llm.ainvoke("ab?")).response_metadata["lookahead"]["target_forward_passes"] for _ in range(40)]
    return sum(reported) / len(reported)
