"""When a draft step harms: a rule on what followed from it and from the target's step, with its own error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb


@dataclass(frozen=True)
class HarmRule:
    """Decides by how often the target came to the right answer from the draft's step and from its own.

    First a few continuations from each; only where the draft's step was right less often by a margin, more are written,
    and a one-sided exact test of Fisher's on these alone decides. So a pair that does no harm is called harmful with a
    probability of at most `level`, and of much less unless chance has raised a suspicion before.

    Attributes:
        seeds: Continuations from each step at first.
        margin: By how many of them the draft's step must fall short to be suspected.
        confirm: Continuations from each step of a suspected pair.
        level: Of the test.
    """

    seeds: int = 4
    margin: int = 2
    confirm: int = 12
    level: float = 0.01

    def suspected(self, draft: Sequence[bool], target: Sequence[bool]) -> bool:
        """Whether the first continuations raise a suspicion."""
        return sum(target[: self.seeds]) - sum(draft[: self.seeds]) >= self.margin

    def missing(self, draft: Sequence[bool], target: Sequence[bool]) -> int:
        """How many more continuations from each step the rule needs."""
        if len(draft) < self.seeds:
            return self.seeds - len(draft)
        return self.seeds + self.confirm - len(draft) if self.suspected(draft, target) else 0

    def harmful(self, draft: Sequence[bool], target: Sequence[bool]) -> bool:
        """Whether the draft's step does harm.

        Args:
            draft: Whether each continuation from the draft's step was right, in order.
            target: The same from the target's step.
        """
        if not self.suspected(draft, target):
            return False
        return fisher(sum(draft[self.seeds :]), sum(target[self.seeds :]), self.confirm) <= self.level

    def chance_of_harmful(self, draft: float, target: float) -> float:
        """Probability that a pair is called harmful.

        Args:
            draft: Probability that a continuation from the draft's step is right.
            target: The same of the target's step.
        """
        return _both(self.seeds, draft, target, lambda d, t: t - d >= self.margin) * _both(
            self.confirm, draft, target, lambda d, t: fisher(d, t, self.confirm) <= self.level
        )


def _both(count: int, draft: float, target: float, holds: Callable[[int, int], bool]) -> float:
    return sum(
        _binomial(count, d, draft) * _binomial(count, t, target)
        for d in range(count + 1)
        for t in range(count + 1)
        if holds(d, t)
    )


def _binomial(count: int, successes: int, probability: float) -> float:
    return comb(count, successes) * probability**successes * (1 - probability) ** (count - successes)


@lru_cache(maxsize=4096)
def fisher(draft: int, target: int, count: int) -> float:
    """One-sided p-value of Fisher's exact test.

    Args:
        draft: Right continuations from the draft's step.
        target: Right continuations from the target's step.
        count: Continuations from each.

    Returns:
        How likely the draft's step has no more right ones if both are right equally often.
    """
    right = draft + target
    ways = sum(comb(count, d) * comb(count, right - d) for d in range(max(0, right - count), draft + 1))
    return ways / comb(2 * count, right)
