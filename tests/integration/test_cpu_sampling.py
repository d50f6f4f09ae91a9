"""How tokens are chosen on a CPU beside guesses, and without sorting the vocabulary."""

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

cpu_sampling.replace_sampling()  # here, and in the process that imports this module


def test_each_guessed_token_has_its_replys_value() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    expand = rejection_sampler.expand_batch_to_tokens
    temperatures = expand(torch.tensor([0.7, 1.3, 0.0]), ends, 5, 0, 1)
    assert torch.equal(temperatures, torch.tensor([0.7, 0.7, 1, 1, 1]))
    likeliest = expand(torch.tensor([20, 40, 60], dtype=torch.int32), ends, 5)
    assert torch.equal(likeliest, torch.tensor([20, 20, 60, 60, 60], dtype=torch.int32))
    assert expand(torch.tensor([0.5]), torch.tensor([0], dtype=torch.int32), 0).shape == (0,)


@given(
    rows=st.integers(1, 4),
    every=st.sampled_from([30, 700, 5000]),
    k=st.one_of(st.none(), st.lists(st.sampled_from([1, 2, 20, 2000, 10**6]), min_size=4, max_size=4)),
    p=st.lists(st.sampled_from([0.01, 0.5, 0.8, 0.95, 1.0]), min_size=4, max_size=4),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_the_filter_keeps_what_vllms_keeps(
    rows: int, every: int, k: list[int] | None, p: list[float], spread: float, dtype: torch.dtype, seed: int
) -> None:
    """In bfloat16 many logits are equal: then vLLM keeps all that are as likely as the last of the k.

    vLLM samples by float32, and so its filter is asked: in bfloat16 its sums of chances would be off by whole tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, every, generator=generator) * spread).to(dtype)
    of_k = torch.tensor([min(each, every) for each in k[:rows]]) if k is not None else None
    of_p = torch.tensor(p[:rows])
    wanted = apply_top_k_top_p_pytorch(logits.clone().float(), of_k, of_p, allow_cpu_sync=True)
    found = rejection_sampler.apply_top_k_top_p(logits.clone(), of_k, of_p)
    assert found.dtype == dtype
    kept = [each > -torch.inf for each in (wanted, found)]
    # Sums of many small numbers: where the last token's share is what they are rounded by, either is right. Of tokens
    # that are equally likely, either may be the last.
    chances = torch.softmax(logits.float(), dim=-1)
    for row in range(rows):
        missing = chances[row][kept[0][row] & ~kept[1][row]].sum()
        more = chances[row][kept[1][row] & ~kept[0][row]].sum()
        last = chances[row][kept[0][row]].min()
        assert abs(float(missing - more)) <= float(last) * 1.01 + 1e-4
        assert torch.equal(found[row][kept[1][row]], logits[row][kept[1][row]])


def test_ties_at_the_last_of_the_likeliest_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    kept = rejection_sampler.apply_top_k_top_p(logits.clone(), torch.tensor([2]), torch.tensor([1.0]))
    assert torch.equal(kept > -torch.inf, torch.tensor([[True, True, True, True, False]]))


def load_kernels() -> None:
    """What vLLM's processes have loaded."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def sampled_beside(guess: int, chances: list[float], replies: int) -> list[float]:
    """How often vLLM's own rejection, by its kernels for CPUs, takes each token where `guess` was guessed."""
    torch.manual_seed(guess)
    temperature = torch.full((replies,), 0.5)
    metadata: Any = SimpleNamespace(
        temperature=temperature, all_greedy=False, all_random=True, top_p=None, top_k=None, generators={}
    )
    ends = torch.arange(1, replies + 1, dtype=torch.int32)
    at_half = (torch.tensor(chances).log() / 2).repeat(replies, 1)
    logits = rejection_sampler.apply_sampling_constraints(at_half, ends, metadata)
    found = rejection_sampler.rejection_sample(
        torch.full((replies,), guess, dtype=torch.int32),
        [1] * replies,
        1,
        ends,
        None,
        logits,
        torch.zeros((replies, 1), dtype=torch.int64),
        metadata,
    )
    share: list[float] = (torch.bincount(found[:, 0].long(), minlength=len(chances)) / replies).tolist()
    return share


@pytest.fixture(scope="module")
def vllms_process() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: the kernels replace what every module holds, and stumble over modules of other tests."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=load_kernels) as process:
        yield process


@pytest.mark.parametrize("guess", [0, 3, 7])
def test_beside_guesses_tokens_come_as_often_as_without(vllms_process: ProcessPoolExecutor, guess: int) -> None:
    """A guess changes how a token is found, and not which."""
    chances, replies = [0.3, 0.25, 0.2, 0.1, 0.05, 0.05, 0.03, 0.02], 20_000
    shares = vllms_process.submit(sampled_beside, guess, chances, replies).result()
    assert shares == pytest.approx(chances, abs=5 * (0.25 / replies) ** 0.5)


def test_the_module_is_what_vllm_uses() -> None:
    assert rejection_sampler.expand_batch_to_tokens is cpu_sampling.for_each_token
