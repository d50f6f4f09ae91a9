"""Sampling on CPUs: correct with draft tokens, and without sorting the vocabulary for every token.

- **Correct**: without Triton for CPUs, vLLM (0.32) repeats each reply's temperature, top-k and top-p per draft token
  with a kernel for integers. It writes into a copy, so vLLM samples with uninitialized values. Here the values are
  repeated unchanged.
- **Fast**: vLLM finds top-p (and top-k with it) by sorting all logits. For 150,000 logits this takes 10 ms per row, a
  quarter of a pass of a 1.5B model on two cores. Here only the likeliest are sorted, if no other may be sampled.
"""

from collections.abc import Callable

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

_MAX_CANDIDATES = 1024  # likeliest tokens to sort before all are sorted

Filter = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


def for_each_token(
    parameters: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each reply's parameter, shape (n,), for its draft tokens, which end at `ends`; returns shape (tokens,)."""
    values = torch.where(parameters == replace_from, torch.full_like(parameters, replace_to), parameters)
    return values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)), output_size=tokens)


def with_partial_sort(sort_all: Filter) -> Filter:
    """A top-k and top-p filter that sorts only the likeliest tokens, and falls back to `sort_all` for other rows."""

    def keep_likeliest(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        """Set logits, shape (n, v), to -∞ outside the k likeliest tokens or the mass p, both of shape (n,)."""
        if p is None or logits.shape[0] == 0:
            return sort_all(logits, k, p)
        vocabulary = logits.shape[1]
        largest_k = vocabulary if k is None else int(k.max())
        values, indices = logits.float().topk(min(largest_k, _MAX_CANDIDATES), dim=-1)
        ranks = torch.arange(values.shape[1])
        allowed = torch.full((len(logits), 1), vocabulary) if k is None else k.to(torch.long)[:, None]
        candidates = values.masked_fill(ranks >= allowed, -torch.inf)
        k_is_covered = allowed <= values.shape[1]
        log_total = candidates.logsumexp(dim=-1, keepdim=True)
        if not bool(k_is_covered.all()):
            log_total = torch.where(k_is_covered, log_total, logits.float().logsumexp(dim=-1, keepdim=True))
        probabilities = (candidates - log_total).exp()
        preceding = probabilities.cumsum(dim=-1) - probabilities
        kept = ((preceding < p[:, None]) | (p[:, None] >= 1)) & (candidates > -torch.inf)
        kept[:, 0] = True
        # A row is complete if the candidates include every token that may be sampled: all k, with no tie beyond the
        # last of them, or without a k, fewer tokens than there are candidates.
        last = values.gather(1, (allowed.clamp(max=values.shape[1]) - 1))
        has_no_ties = (logits >= last).sum(dim=-1, keepdim=True) <= allowed
        is_complete = torch.where(k_is_covered, has_no_ties, ~kept[:, -1:] & (allowed == vocabulary)).squeeze(1)
        others = ~is_complete
        sorted_all = logits[:0]
        if bool(others.any()):
            # The logits are in float32, as everything above: sums of probabilities in bfloat16 are off by whole tokens.
            sorted_all = sort_all(logits[others].float(), None if k is None else k[others], p[others]).to(logits.dtype)
        logits.fill_(-torch.inf)
        logits.scatter_(1, indices, values.masked_fill(~kept, -torch.inf).to(logits.dtype))
        logits[others] = sorted_all
        return logits

    return keep_likeliest


def replace_sampling() -> None:
    """Install both replacements in this process."""
    rejection_sampler.expand_batch_to_tokens = for_each_token
    topk_topp_sampler.apply_top_k_top_p = with_partial_sort(topk_topp_sampler.apply_top_k_top_p)
    rejection_sampler.apply_top_k_top_p = topk_topp_sampler.apply_top_k_top_p
