"""The speedup of Lookahead Reasoning in theory (arXiv 2506.19830, section 3.3); docs/explanation/theory.md derives it.

Time is counted in target steps: a target step takes 1, a draft step c ≤ 1, a verdict nothing, and any number of target
steps run at once at no cost. Every step is accepted with probability α, independently. Speedup is steps per unit of
time, the target alone making 1. The functions take

    alpha: Probability that a step is accepted, in [0, 1].
    c: Time of a draft step over that of a target step, in (0, 1].
    depth: Steps in flight at the front, or of a round, γ ≥ 1.
    token_alpha, token_c, token_depth: The same of tokens, α₂, c₂ and γ₂; of γ₂ tokens in a pass one needs no draft.

and raise ConfigurationError for a value out of its range.
"""

import math

from lookahead_agent.errors import ConfigurationError


def synchronous_speedup(alpha: float, c: float, depth: int) -> float:
    """Speedup of the synchronous variant: rounds of `depth` draft steps."""
    _check(alpha, c, depth)
    return _steps_of_a_window(alpha, depth) / (1 + c * (depth - 1))


def asynchronous_speedup(alpha: float, c: float, depth: int) -> float:
    """Speedup of the asynchronous variant: exact where the draft is the limit, a lower bound where the depth is."""
    _check(alpha, c, depth)
    if is_draft_bound(c, depth):
        return 1 / (c + (1 - c) * (1 - alpha))
    steps = _steps_of_a_window(alpha, depth)
    return steps / (1 + c * (steps - 1))


def shared_draft_speedup(alpha: float, c: float) -> float:
    """Speedup of a target with a shared draft, which writes draft tokens meanwhile: an upper bound."""
    return asynchronous_speedup(alpha, c, math.ceil(1 / c) if c > 0 else 1)


def combined_speedup(alpha: float, c: float, depth: int, token_alpha: float, token_c: float, token_depth: int) -> float:
    """Speedup of lookahead whose target steps are written with token-level speculation."""
    tokens = synchronous_speedup(token_alpha, token_c, token_depth)  # with tokens in place of steps
    return tokens * (asynchronous_speedup(alpha, c * tokens, depth) if c * tokens < 1 else 1.0)


def best_split(alpha: float, c: float, token_alpha: float, token_c: float, parallel: int) -> tuple[int, int, float]:
    """The best division of M = `parallel` tokens, which a pass takes at nearly no cost, among steps and tokens.

    Returns:
        γ₁, γ₂ with γ₁·γ₂ ≤ M, and the speedup; γ₁ = 1 is no lookahead, γ₂ = 1 no token-level speculation. Of equal
        ones the smallest.
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
    """Whether the depth is enough for the draft never to wait: γ ≥ ⌈1/c⌉."""
    return depth >= math.ceil(1 / c - 1e-9)


def _steps_of_a_window(alpha: float, depth: int) -> float:
    """Steps committed by a window on average: 1 + α + … + α^(γ-1)."""
    return sum(alpha**k for k in range(depth))


def _check(alpha: float, c: float, depth: int) -> None:
    if not 0 <= alpha <= 1:
        raise ConfigurationError(f"alpha is a probability, not {alpha}")
    if not 0 < c <= 1:
        raise ConfigurationError(f"c is in (0, 1], not {c}: a draft slower than its target cannot help")
    if depth < 1:
        raise ConfigurationError(f"depth is at least 1, not {depth}")
