"""Predicts the speed of a mode from measured costs and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from lookahead_agent.cost_model.costs import MachineCosts
from lookahead_agent.theory.simulation import Durations, always, simulate, simulate_shared_draft

_STEPS = 200
_TOKENS = 3000

ModeName = Literal["off", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft"]
LOOKAHEAD: tuple[ModeName, ...] = ("lr", "lr+sd", "lr+shared_draft")
"""Modes with step speculation."""
Speed = Callable[[int], float]
"""Tokens per second of each of so many target steps at once, over those of the target alone."""


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates, and the steps that they are of."""

    steps: float  # probability that a draft step is accepted (α), in [0, 1]
    tokens: float  # probability that a draft token is accepted (α₂), in [0, 1]
    step_tokens: float = 40.0  # tokens of a step, on average


def fastest(
    costs: MachineCosts, acceptance: Acceptance, depths: Sequence[int], token_depth: int
) -> tuple[ModeName, int, float]:
    """The mode that is predicted to be the fastest, its depth (0 without step speculation), and its speed."""
    settings = [(mode, depth) for mode in get_args(ModeName) for depth in (depths if mode in LOOKAHEAD else (0,))]
    speeds = {setting: predicted_speed(costs, acceptance, *setting, token_depth) for setting in settings}
    best = max(speeds, key=lambda setting: (round(speeds[setting], 3), -setting[1]))
    return *best, speeds[best]


def predicted_speed(
    costs: MachineCosts, acceptance: Acceptance, mode: ModeName, depth: int, token_depth: int, replies: int = 1
) -> float:
    """Predicted speed of one setting with so many replies at once, against the target alone with as many.

    The simulation runs steps on the decoder's own scheduler, with the measured cost of as many target steps at once as
    there are at each moment. With token speculation a forward pass of the target looks at γ₂ tokens of each step. It
    costs as much as a batch of so many replies, and gains (1-α₂^γ₂)/(1-α₂) tokens. With a shared draft it looks at the
    tokens that the draft, on cores of its own, has written by then.
    """
    if replies > 1:
        costs = costs.shared_by(replies)
    speed = _target_speed(costs, acceptance, mode, token_depth)
    if mode not in LOOKAHEAD:
        return speed(1)
    alone = costs.target.at(1) * acceptance.step_tokens
    durations = Durations(
        always(alone / speed(1)),
        always(costs.draft.at(1) * acceptance.step_tokens),
        slowdown=lambda steps: speed(1) / speed(steps),
    )
    found = simulate(acceptance.steps, depth, durations, steps=_STEPS)
    return found.steps * alone / found.seconds


def _target_speed(costs: MachineCosts, acceptance: Acceptance, mode: ModeName, token_depth: int) -> Speed:
    target = costs.target if mode in ("off", "sd") else costs.beside
    alone = costs.target.at(1)
    by_tokens = token_depth if mode in ("sd", "lr+sd") else 1
    draft_token = costs.draft_alone.at(1) * target.at(1) / alone  # the draft model runs where the target does
    committed = sum(acceptance.tokens**position for position in range(by_tokens))

    @cache
    def speed(steps: int) -> float:
        if mode not in ("shared_draft", "lr+shared_draft"):
            return committed * alone / (target.at(steps * by_tokens) + draft_token * (by_tokens - 1))
        one = target.at(steps)
        found = simulate_shared_draft(
            acceptance.tokens,
            min(1.0, costs.draft.at(1) / one),  # with steps ahead the draft writes beside copies of those before
            token_depth - 1,
            lambda tokens: target.at(steps * tokens) / one,
            tokens=_TOKENS,
        )
        return found * alone / one

    return speed
