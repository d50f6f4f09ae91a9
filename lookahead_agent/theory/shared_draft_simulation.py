"""Simulation of a shared draft: it writes beside the target, whose passes look at what is written by then."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SharedDraftRun:
    """What a simulated reply of a target with a shared draft came to.

    Attributes:
        tokens: Written.
        passes: Of the target.
        seconds: In the time of a pass of one token.
    """

    tokens: int
    passes: int
    seconds: float

    @property
    def speedup(self) -> float:
        """Against the target alone."""
        return self.tokens / self.seconds


def simulate_shared_draft(
    alpha: float,
    c: float,
    most: int,
    cost: Callable[[int], float] = lambda _: 1.0,
    *,
    tokens: int = 20_000,
    seed: int = 0,
) -> SharedDraftRun:
    """Simulate one long reply.

    The draft writes a token every c from the last word that both agree about. A pass of the target takes what the draft
    has written ahead of it by then, up to `most` tokens, and gains those before the first wrong one and one token of
    its own. If something was wrong, or the target has overtaken the draft with another word than the draft would have
    written, the draft begins anew after the target's last word.

    Args:
        alpha: Probability that a token of the draft is the target's (α₂), in [0, 1].
        c: Time of a draft token over that of a target's pass of one token.
        most: Guesses of a pass at most.
        cost: Time of a pass by its number of tokens, the guesses and one more; 1 for one.
        tokens: Of the reply.
        seed: Of the random numbers.
    """
    draw = random.Random(seed)

    def right_ahead() -> int:
        """How many of the draft's next tokens are right, before one that is not."""
        count = 0
        while draw.random() < alpha:
            count += 1
            if count >= tokens:
                break
        return count

    now, written, passes = 0.0, 0, 0
    begun, began_at, right = 0, 0.0, right_ahead()
    while written < tokens:
        drafted = begun + int((now - began_at) / c + 1e-9)
        draft_tokens = max(0, min(drafted - written, most))
        gained = min(draft_tokens, begun + right - written) + 1
        now += cost(draft_tokens + 1)
        passes += 1
        written += gained
        if written > begun + right:  # the target's own word at the end is not the draft's
            begun, began_at, right = written, now, right_ahead()
        elif written > begun + int((now - began_at) / c + 1e-9):
            # It has caught up with a draft that is slower: the draft goes on from the target's word.
            right -= written - begun
            begun, began_at = written, now
    return SharedDraftRun(written, passes, now)
