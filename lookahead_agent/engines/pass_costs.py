"""What a pass of a model costs, read from a few measured sizes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise


def cost_at(costs: Mapping[int, float], tokens: float) -> float:
    """The cost of a pass of so many tokens: between measured sizes by a straight line, beyond them too.

    Args:
        costs: By number of tokens, at least one entry.
        tokens: In the pass.
    """
    sizes = sorted(costs)
    if len(sizes) == 1:
        return costs[sizes[0]]
    low, high = next(((low, high) for low, high in pairwise(sizes) if tokens <= high), (sizes[-2], sizes[-1]))
    return costs[low] + (costs[high] - costs[low]) * (tokens - low) / (high - low)
