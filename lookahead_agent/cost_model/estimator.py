"""Predicts the fastest mode, depth, width and token speculation from costs and acceptance."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal, get_args

from lookahead_agent.cost_model.costs import MachineCosts
from lookahead_agent.theory.simulation import Durations, always, simulate, simulate_shared_draft

_STEPS = 200
_TOKENS = 3000
# The settings that are tried: γ₁, w, and γ₂ of token speculation in turn and with a shared draft.
_DEPTHS, _WIDTHS, _TOKEN_DEPTHS, _SHARED_DRAFT_DEPTHS = (1, 2, 4, 6, 8), (1, 2), (2, 3, 5, 7), (3, 5, 9, 17)

ModeName = Literal["off", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft"]
LOOKAHEAD: tuple[ModeName, ...] = ("lr", "lr+sd", "lr+shared_draft")  # modes with step speculation
Speed = Callable[[int], float]  # tokens per second of each of so many target steps, over the target's alone


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates, and the steps that they are of."""

    steps: float  # probability that a draft step is accepted (α), in [0, 1]
    tokens: float  # probability that a draft token is accepted (α₂), in [0, 1]
    step_tokens: float = 40.0  # tokens of a step, on average
    verifier: float = 0.0  # seconds of a verdict


@dataclass(frozen=True)
class Setting:
    """A setting and its predicted speed."""

    mode: ModeName  # the mode
    speedup: float  # against the target alone
    depth: int = 0  # γ₁; 0 without lookahead, as for `width`
    width: int = 0  # w
    token_depth: int = 1  # γ₂: tokens of a step that one forward pass looks at; 1 without token speculation


def best_settings(costs: MachineCosts, acceptance: Acceptance) -> list[Setting]:
    """The best setting of each mode, the fastest mode first.

    The simulation runs steps on the decoder's own scheduler, with the measured cost of as many target steps at once as
    there are at each moment. With token speculation a forward pass looks at γ₂ tokens of each step, costs as much as a
    batch of so many replies, and gains (1-α₂^γ₂)/(1-α₂) tokens; with a shared draft, at what that has written by then.
    """

    def order(setting: Setting) -> tuple[float, int]:
        return round(setting.speedup, 3), -setting.depth * setting.width

    best = [max(_settings(costs, acceptance, mode), key=order) for mode in get_args(ModeName)]
    return sorted(best, key=lambda setting: -setting.speedup)


def predicted_speed(
    costs: MachineCosts, acceptance: Acceptance, mode: ModeName, depth: int, token_depth: int, replies: int = 1
) -> float:
    """Predicted speed of one setting with so many replies at once, against the target alone with as many."""
    if replies > 1:
        costs = costs.shared_by(replies)
    speed = _target_speed(costs, acceptance, mode, token_depth)
    return _reply_speed(costs, acceptance, speed, depth if mode in LOOKAHEAD else 0, 1)


def _settings(costs: MachineCosts, acceptance: Acceptance, mode: ModeName) -> Iterator[Setting]:
    tokens = {"off": (1,), "lr": (1,), "sd": _TOKEN_DEPTHS, "lr+sd": _TOKEN_DEPTHS}
    # A second candidate and draft tokens want the same room in a batch.
    widths = _WIDTHS if mode == "lr" else (1,)
    shapes = list(product(_DEPTHS, widths)) if mode in LOOKAHEAD else [(0, 0)]
    for token_depth in tokens.get(mode, _SHARED_DRAFT_DEPTHS):
        speed = _target_speed(costs, acceptance, mode, token_depth)
        for depth, width in shapes:
            yield Setting(mode, _reply_speed(costs, acceptance, speed, depth, width), depth, width, token_depth)


def _reply_speed(costs: MachineCosts, acceptance: Acceptance, speed: Speed, depth: int, width: int) -> float:
    """Speed of a reply by that of its target steps; a depth of 0 is without lookahead."""
    if depth == 0:
        return speed(1)
    alone = costs.target.at(1) * acceptance.step_tokens
    durations = Durations(
        always(alone / speed(1)),
        always(costs.draft.at(width) * acceptance.step_tokens),
        always(acceptance.verifier),
        slowdown=lambda steps: speed(1) / speed(steps),
    )
    found = simulate(acceptance.steps, depth, durations, steps=_STEPS, width=width)
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
