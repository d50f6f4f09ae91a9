"""Predicts the fastest mode, depth, width and token speculation from costs and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from lookahead_agent.cost_model.costs import MachineCosts
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.theory.simulation import Durations, always, simulate, simulate_shared_draft

_STEPS = 200
_TOKENS = 3000

ModeName = Literal["off", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft"]
TokenMethod = Literal["draft_model", "ngram"]
Speed = Callable[[int], float]
"""Tokens per second of each of so many target steps at once, over those of the target alone."""


@dataclass(frozen=True)
class Grid:
    """The settings that are tried."""

    depths: tuple[int, ...] = (1, 2, 4, 6, 8)  # γ₁
    widths: tuple[int, ...] = (1, 2)  # w
    token_depths: tuple[int, ...] = (2, 3, 5, 7)  # γ₂, of token speculation by `TokenMethod`
    shared_draft_depths: tuple[int, ...] = (3, 5, 9, 17)  # γ₂, with a shared draft


EVERY = Grid()


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates, and the steps that they are of.

    Raises:
        ConfigurationError: A value out of its range.
    """

    steps: float  # probability that a draft step is accepted (α), in [0, 1]
    tokens: float  # probability that a draft token is accepted (α₂), in [0, 1]
    step_tokens: float = 40.0  # tokens of a step, on average
    verifier: float = 0.0  # seconds of a verdict

    def __post_init__(self) -> None:
        for name, value in (("step", self.steps), ("token", self.tokens)):
            if not 0 <= value <= 1:
                raise ConfigurationError(f"the {name} acceptance is a probability, not {value}")
        if self.step_tokens < 1 or self.verifier < 0:
            raise ConfigurationError("a step has a token at least, and a verdict takes no negative time")


@dataclass(frozen=True)
class Setting:
    """A setting and its predicted speed."""

    mode: ModeName  # the mode
    speedup: float  # against the target alone
    depth: int = 0  # γ₁; 0 without lookahead, as for `width`
    width: int = 0  # w
    token_depth: int = 1  # γ₂: tokens of a step that one forward pass looks at; 1 without token speculation


def best_settings(
    costs: MachineCosts, acceptance: Acceptance, *, tokens_by: TokenMethod = "draft_model", grid: Grid = EVERY
) -> list[Setting]:
    """The best setting of each mode, the fastest mode first.

    The simulation runs steps on the decoder's own scheduler, with the measured cost of as many target steps at once as
    there are at each moment. With token speculation a forward pass of the target looks at γ₂ tokens of each step. It
    costs as much as a batch of so many replies, and gains (1-α₂^γ₂)/(1-α₂) tokens. With a shared draft it looks at the
    tokens that the draft, on cores of its own, has written by then.

    Args:
        tokens_by: The draft model on the target's cores writes draft tokens, or n-grams of the text, at no cost.
    """
    speed = partial(_token_speed, costs, acceptance, tokens_by)
    shared = partial(_shared_draft_speed, costs, acceptance)
    ahead = partial(_lookahead, costs, acceptance, grid)
    modes: list[Iterable[Setting]] = [
        [Setting("off", 1.0)],
        (Setting("sd", speed(alone=True, depth=depth)(1), token_depth=depth) for depth in grid.token_depths),
        ahead(speed(alone=False, depth=1), "lr", 1),
        (each for depth in grid.token_depths for each in ahead(speed(alone=False, depth=depth), "lr+sd", depth)),
        (Setting("shared_draft", shared(depth)(1), token_depth=depth) for depth in grid.shared_draft_depths),
        (each for depth in grid.shared_draft_depths for each in ahead(shared(depth), "lr+shared_draft", depth)),
    ]
    best = [
        max(settings, key=lambda setting: (round(setting.speedup, 3), -setting.depth * setting.width))
        for settings in modes
    ]
    return sorted(best, key=lambda setting: -setting.speedup)


def predicted_speed(
    costs: MachineCosts, acceptance: Acceptance, mode: ModeName, depth: int, token_depth: int, replies: int = 1
) -> float:
    """Predicted speed of one setting, against the target alone with as many replies at once.

    Args:
        depth: γ₁, where steps are speculated on.
        token_depth: γ₂, where tokens are.
        replies: At once; each has a share of every batch.
    """
    if mode == "off":
        return 1.0
    if replies > 1:
        costs = costs.shared_by(replies)
    if mode in ("shared_draft", "lr+shared_draft"):
        speed = _shared_draft_speed(costs, acceptance, token_depth)
    else:
        by_tokens = token_depth if mode != "lr" else 1
        speed = _token_speed(costs, acceptance, "draft_model", alone=mode == "sd", depth=by_tokens)
    return speed(1) if mode in ("sd", "shared_draft") else _steps_speed(costs, acceptance, speed, depth, 1)


def _lookahead(
    costs: MachineCosts, acceptance: Acceptance, grid: Grid, speed: Speed, mode: ModeName, token_depth: int
) -> Iterable[Setting]:
    """Every depth and width of a mode."""
    for depth in grid.depths:
        # A second candidate and draft tokens want the same room in a batch.
        for width in grid.widths if token_depth == 1 else (1,):
            yield Setting(mode, _steps_speed(costs, acceptance, speed, depth, width), depth, width, token_depth)


def _steps_speed(costs: MachineCosts, acceptance: Acceptance, speed: Speed, depth: int, width: int) -> float:
    alone = costs.target.at(1) * acceptance.step_tokens
    durations = Durations(
        always(alone / speed(1)),
        always(costs.draft.at(width) * acceptance.step_tokens),
        always(acceptance.verifier),
        slowdown=lambda steps: speed(1) / speed(steps),
    )
    found = simulate(acceptance.steps, depth, durations, steps=_STEPS, width=width)
    return found.steps * alone / found.seconds


def _token_speed(
    costs: MachineCosts, acceptance: Acceptance, tokens_by: TokenMethod, *, alone: bool, depth: int
) -> Speed:
    target = costs.target if alone else costs.beside
    share = costs.target.at(1) / target.at(1)  # the draft model runs where the target does
    draft_token = costs.draft_alone.at(1) / share if tokens_by == "draft_model" else 0.0
    committed = sum(acceptance.tokens**position for position in range(depth))

    @cache
    def speed(steps: int) -> float:
        seconds = target.at(steps * depth) + draft_token * (depth - 1)
        return committed * costs.target.at(1) / seconds

    return speed


def _shared_draft_speed(costs: MachineCosts, acceptance: Acceptance, depth: int) -> Speed:
    @cache
    def speed(steps: int) -> float:
        alone = costs.beside.at(steps)
        # With steps ahead the draft writes one while the target writes its copies of those before.
        ratio = min(1.0, costs.draft.at(1) / alone)
        found = simulate_shared_draft(
            acceptance.tokens,
            ratio,
            depth - 1,
            lambda tokens: costs.beside.at(steps * tokens) / alone,
            tokens=_TOKENS,
        )
        return found.speedup * costs.target.at(1) / alone

    return speed
