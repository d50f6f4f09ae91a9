"""Measured costs between the sizes that were measured."""

from collections.abc import Mapping
from itertools import pairwise


def cost_at(costs: Mapping[int, float], tokens: float) -> float:
    """The cost of a pass of `tokens` tokens, by linear interpolation and extrapolation of measured costs."""
    sizes = sorted(costs)
    if len(sizes) == 1:
        return costs[sizes[0]]
    low, high = next(((low, high) for low, high in pairwise(sizes) if tokens <= high), (sizes[-2], sizes[-1]))
    return costs[low] + (costs[high] - costs[low]) * (tokens - low) / (high - low)
