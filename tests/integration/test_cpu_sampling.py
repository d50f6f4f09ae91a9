"""CPU sampling: correct with draft tokens, and without sorting the vocabulary."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from lookahead_agent.cpu import sampling as cpu_sampling

cpu_sampling.replace_sampling()  # in this process, and in the spawned one that imports this module


def test_sampling_parameters_are_repeated_for_each_draft_token_of_a_reply() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    expand = rejection_sampler.expand_batch_to_tokens
    temperatures = expand(torch.tensor([0.7, 1.3, 0.0]), ends, 5, 0, 1)
    assert torch.equal(temperatures, torch.tensor([0.7, 0.7, 1, 1, 1]))
    top_k = expand(torch.tensor([20, 40, 60], dtype=torch.int32), ends, 5)
    assert torch.equal(top_k, torch.tensor([20, 20, 60, 60, 60], dtype=torch.int32))
    assert expand(torch.tensor([0.5]), torch.tensor([0], dtype=torch.int32), 0).shape == (0,)


@given(
    rows=st.integers(1, 4),
    vocabulary=st.sampled_from([30, 700, 5000]),
    k=st.one_of(st.none(), st.lists(st.sampled_from([1, 2, 20, 2000, 10**6]), min_size=4, max_size=4)),
    p=st.lists(st.sampled_from([0.01, 0.5, 0.8, 0.95, 1.0]), min_size=4, max_size=4),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_top_k_top_p_filter_keeps_the_same_tokens_as_vllm(
    rows: int, vocabulary: int, k: list[int] | None, p: list[float], spread: float, dtype: torch.dtype, seed: int
) -> None:
    """In bfloat16 many logits are equal: vLLM then keeps all tokens that are as likely as the k-th.

    vLLM samples in float32, so its filter gets float32. In bfloat16 its cumulative sums would be off by whole tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=generator) * spread).to(dtype)
    top_ks = torch.tensor([min(each, vocabulary) for each in k[:rows]]) if k is not None else None
    top_ps = torch.tensor(p[:rows])
    expected = apply_top_k_top_p_pytorch(logits.clone().float(), top_ks, top_ps, allow_cpu_sync=True)
    found = rejection_sampler.apply_top_k_top_p(logits.clone(), top_ks, top_ps)
    assert found.dtype == dtype
    kept = [each > -torch.inf for each in (expected, found)]
    # Cumulative sums round: if the last token's share is within that rounding, keeping or dropping it is correct.
    # Any of several equally likely tokens may be the last.
    probabilities = torch.softmax(logits.float(), dim=-1)
    for row in range(rows):
        missing = probabilities[row][kept[0][row] & ~kept[1][row]].sum()
        extra = probabilities[row][kept[1][row] & ~kept[0][row]].sum()
        last = probabilities[row][kept[0][row]].min()
        assert abs(float(missing - extra)) <= float(last) * 1.01 + 1e-4
        assert torch.equal(found[row][kept[1][row]], logits[row][kept[1][row]])


def test_top_k_keeps_all_tokens_tied_with_the_kth() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    kept = rejection_sampler.apply_top_k_top_p(logits.clone(), torch.tensor([2]), torch.tensor([1.0]))
    assert torch.equal(kept > -torch.inf, torch.tensor([[True, True, True, True, False]]))


def load_kernels() -> None:
    """Load vLLM's CPU kernels, as its own processes do."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def sampled_shares(draft_token: int, probabilities: list[float], replies: int) -> list[float]:
    """Share of each token that vLLM's rejection sampler, with its CPU kernels, returns for one draft token."""
    torch.manual_seed(draft_token)
    temperature = torch.full((replies,), 0.5)
    metadata: Any = SimpleNamespace(
        temperature=temperature, all_greedy=False, all_random=True, top_p=None, top_k=None, generators={}
    )
    ends = torch.arange(1, replies + 1, dtype=torch.int32)
    tempered = (torch.tensor(probabilities).log() / 2).repeat(replies, 1)
    logits = rejection_sampler.apply_sampling_constraints(tempered, ends, metadata)
    found = rejection_sampler.rejection_sample(
        torch.full((replies,), draft_token, dtype=torch.int32),
        [1] * replies,
        1,
        ends,
        None,
        logits,
        torch.zeros((replies, 1), dtype=torch.int64),
        metadata,
    )
    shares: list[float] = (torch.bincount(found[:, 0].long(), minlength=len(probabilities)) / replies).tolist()
    return shares


@pytest.fixture(scope="module")
def kernel_process() -> Iterator[ProcessPoolExecutor]:
    """A separate process: loading the kernels patches every imported module, and fails on those of other tests."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=load_kernels) as process:
        yield process


@pytest.mark.parametrize("draft_token", [0, 3, 7])
def test_rejection_keeps_the_target_distribution(kernel_process: ProcessPoolExecutor, draft_token: int) -> None:
    probabilities, replies = [0.3, 0.25, 0.2, 0.1, 0.05, 0.05, 0.03, 0.02], 20_000
    shares = kernel_process.submit(sampled_shares, draft_token, probabilities, replies).result()
    assert shares == pytest.approx(probabilities, abs=5 * (0.25 / replies) ** 0.5)


def test_vllm_uses_the_replacement() -> None:
    assert rejection_sampler.expand_batch_to_tokens is cpu_sampling.for_each_token
