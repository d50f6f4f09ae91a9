"""Sampling on CPUs, correct beside draft tokens, and without sorting the vocabulary for every token.

- **Correct**: without a Triton for CPUs, vLLM (0.32) hands each reply's temperature, top-k and top-p to its draft
  tokens by a kernel that takes whole numbers only. It writes into a copy: the tokens are then sampled by whatever was
  in memory. Here the values are handed on as they are.
- **Fast**: vLLM finds top-p (and top-k with it) by sorting all logits, 10 ms a row for 150,000 of them, a quarter of a
  pass of a 1.5B model on two cores. Here only the likeliest are sorted, where they hold all that may be sampled.
"""

from collections.abc import Callable

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

_REACH = 1024  # so many of the likeliest tokens are looked at before all are sorted

Filter = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


def for_each_token(
    of_replies: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each reply's parameter, shape (n,), for its draft tokens, which end at `ends`; gives shape (tokens,)."""
    values = torch.where(of_replies == replace_from, torch.full_like(of_replies, replace_to), of_replies)
    return values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)), output_size=tokens)


def without_sorting_all(sort_all: Filter) -> Filter:
    """A filter by top-k and top-p that sorts the likeliest tokens only, or by vLLM's where they are not enough."""

    def keep_likeliest(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        """Logits (n, v), with -∞ for tokens not among the k likeliest or not needed for p, both of shape (n,)."""
        if p is None or logits.shape[0] == 0:
            return sort_all(logits, k, p)
        every = logits.shape[1]
        most = every if k is None else int(k.max())
        values, where = logits.float().topk(min(most, _REACH), dim=-1)
        ranks = torch.arange(values.shape[1])
        allowed = torch.full((len(logits), 1), every) if k is None else k.to(torch.long)[:, None]
        among = values.masked_fill(ranks >= allowed, -torch.inf)
        limited = allowed <= values.shape[1]
        of_all = among.logsumexp(dim=-1, keepdim=True)
        if not bool(limited.all()):
            of_all = torch.where(limited, of_all, logits.float().logsumexp(dim=-1, keepdim=True))
        chances = (among - of_all).exp()
        before = chances.cumsum(dim=-1) - chances
        kept = ((before < p[:, None]) | (p[:, None] >= 1)) & (among > -torch.inf)
        kept[:, 0] = True
        # All that may be sampled is in reach: k tokens, with none beyond that is as likely as the last of them, or
        # without a k fewer than were looked at.
        last = values.gather(1, (allowed.clamp(max=values.shape[1]) - 1))
        alone = (logits >= last).sum(dim=-1, keepdim=True) <= allowed
        whole = torch.where(limited, alone, ~kept[:, -1:] & (allowed == every)).squeeze(1)
        rest = ~whole
        sorted_all = logits[:0]
        if bool(rest.any()):
            # In float32, as everything above: sums of chances in bfloat16 are off by whole tokens.
            sorted_all = sort_all(logits[rest].float(), None if k is None else k[rest], p[rest]).to(logits.dtype)
        logits.fill_(-torch.inf)
        logits.scatter_(1, where, values.masked_fill(~kept, -torch.inf).to(logits.dtype))
        logits[rest] = sorted_all
        return logits

    return keep_likeliest


def replace_sampling() -> None:
    """Have this process sample so."""
    rejection_sampler.expand_batch_to_tokens = for_each_token
    topk_topp_sampler.apply_top_k_top_p = without_sorting_all(topk_topp_sampler.apply_top_k_top_p)
    rejection_sampler.apply_top_k_top_p = topk_topp_sampler.apply_top_k_top_p
