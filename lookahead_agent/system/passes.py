"""The cost of a forward pass, and the tokens that it yields."""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise


def cost_at(costs: Mapping[int, float], tokens: float) -> float:
    """The cost of a pass of `tokens` tokens, by linear interpolation and extrapolation of measured costs."""
    sizes = sorted(costs)
    if len(sizes) == 1:
        return costs[sizes[0]]
    low, high = next(((low, high) for low, high in pairwise(sizes) if tokens <= high), (sizes[-2], sizes[-1]))
    return costs[low] + (costs[high] - costs[low]) * (tokens - low) / (high - low)


def tokens_per_pass(draft_tokens: int, rate: float) -> float:
    """Expected tokens of a forward pass; `rate` < 1 is the acceptance rate of a draft token after accepted ones."""
    return (1 - rate ** (draft_tokens + 1)) / (1 - rate)


def acceptance_rate_of(tokens: float, draft_tokens: int) -> float:
    """The acceptance rate at which a forward pass yields `tokens` tokens: the inverse of `tokens_per_pass`."""
    return bisect_left(range(99_000_000), tokens, key=lambda rate: tokens_per_pass(draft_tokens, rate / 1e8)) / 1e8
