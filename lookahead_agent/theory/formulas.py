"""The speedup of Lookahead Reasoning in theory (arXiv 2506.19830, section 3.3); docs/explanation/theory.md derives it.

Time is counted in target steps: a target step takes 1, a draft step c ≤ 1, a verdict no time. Any number of target
steps run in parallel at no cost. Each step is accepted with probability α, independently. The speedup is the number of
steps per unit of time, which is 1 for the target alone. The functions take

    alpha: Probability that a step is accepted, in [0, 1].
    c: Time of a draft step over that of a target step, in (0, 1].
    depth: Steps in flight at the front, or in a round, γ ≥ 1.
    token_alpha, token_c, token_depth: The same for tokens: α₂, c₂, γ₂; one of γ₂ tokens in a pass needs no draft.

and raise ConfigurationError for a value out of its range.
"""

import math

from lookahead_agent.errors import ConfigurationError


def synchronous_speedup(alpha: float, c: float, depth: int) -> float:
    """The speedup of the synchronous variant: rounds of `depth` draft steps."""
    _check(alpha, c, depth)
    return _steps_per_window(alpha, depth) / (1 + c * (depth - 1))


def asynchronous_speedup(alpha: float, c: float, depth: int) -> float:
    """The speedup of the asynchronous variant: exact if the draft is the bottleneck, a lower bound if the depth is."""
    _check(alpha, c, depth)
    if is_draft_bound(c, depth):
        return 1 / (c + (1 - c) * (1 - alpha))
    steps = _steps_per_window(alpha, depth)
    return steps / (1 + c * (steps - 1))


def shared_draft_speedup(alpha: float, c: float) -> float:
    """An upper bound on the speedup of a shared draft, which writes draft tokens while the target works."""
    return asynchronous_speedup(alpha, c, math.ceil(1 / c) if c > 0 else 1)


def combined_speedup(alpha: float, c: float, depth: int, token_alpha: float, token_c: float, token_depth: int) -> float:
    """The speedup of Lookahead Reasoning whose target steps are written with token-level speculation."""
    token_speedup = synchronous_speedup(token_alpha, token_c, token_depth)  # tokens in place of steps
    return token_speedup * (asynchronous_speedup(alpha, c * token_speedup, depth) if c * token_speedup < 1 else 1.0)


def best_split(alpha: float, c: float, token_alpha: float, token_c: float, parallel: int) -> tuple[int, int, float]:
    """The best split of M = `parallel` tokens, which a forward pass takes at nearly no cost, into steps and tokens.

    Returns:
        γ₁, γ₂ with γ₁·γ₂ ≤ M, and the speedup. γ₁ = 1 means no step speculation, γ₂ = 1 no token-level speculation. A
        tie goes to the smallest split.
    """
    if parallel < 1:
        raise ConfigurationError(f"the target takes at least 1 token at once, not {parallel}")
    splits = [
        (steps, tokens, combined_speedup(alpha, c, steps, token_alpha, token_c, tokens))
        for steps in range(1, parallel + 1)
        for tokens in range(1, parallel // steps + 1)
    ]
    return max(splits, key=lambda split: (round(split[2], 9), -split[0] * split[1]))


def is_draft_bound(c: float, depth: int) -> bool:
    """Whether the draft is the bottleneck: the depth never makes it wait, γ ≥ ⌈1/c⌉."""
    return depth >= math.ceil(1 / c - 1e-9)


def _steps_per_window(alpha: float, depth: int) -> float:
    """The mean number of steps that a window commits: 1 + α + … + α^(γ-1)."""
    return sum(alpha**k for k in range(depth))


def _check(alpha: float, c: float, depth: int) -> None:
    if not 0 <= alpha <= 1:
        raise ConfigurationError(f"alpha is a probability, not {alpha}")
    if not 0 < c <= 1:
        raise ConfigurationError(f"c is in (0, 1], not {c}: a draft slower than its target cannot help")
    if depth < 1:
        raise ConfigurationError(f"depth is at least 1, not {depth}")
