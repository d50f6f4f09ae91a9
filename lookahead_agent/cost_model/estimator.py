"""Which mode, depth, width and token-level setting are predicted to be fastest, from costs and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from lookahead_agent.cost_model.costs import MachineCosts
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.theory.shared_draft_simulation import simulate_shared_draft
from lookahead_agent.theory.simulation import Durations, always, simulate

DEPTHS = (1, 2, 4, 6, 8)
WIDTHS = (1, 2)
TOKEN_DEPTHS = (2, 3, 5, 7)
SHARED_DRAFT_DEPTHS = (3, 5, 9, 17)

_STEPS = 200
_TOKENS = 3000

ModeName = Literal["off", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft"]


@dataclass(frozen=True)
class Acceptance:
    """How much of what is guessed is right, and what it is that is guessed.

    Attributes:
        steps: Probability that a draft step is accepted (α), in [0, 1].
        tokens: Probability that a draft token is (α₂), in [0, 1].
        step_tokens: Tokens of a step, on average.
        verifier: Seconds of a verdict.

    Raises:
        ConfigurationError: A value out of its range.
    """

    steps: float
    tokens: float
    step_tokens: float = 40.0
    verifier: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("step", self.steps), ("token", self.tokens)):
            if not 0 <= value <= 1:
                raise ConfigurationError(f"the {name} acceptance is a probability, not {value}")
        if self.step_tokens < 1 or self.verifier < 0:
            raise ConfigurationError("a step has a token at least, and a verdict takes no negative time")


@dataclass(frozen=True)
class Setting:
    """A way to write replies, and how fast it is predicted to be.

    Attributes:
        mode: "off", "sd", "shared_draft", "lr", "lr+sd" or "lr+shared_draft".
        speedup: Against the target by itself.
        depth: γ₁; 0 without lookahead.
        width: w; 0 without lookahead.
        token_depth: γ₂: tokens that the target looks at in one pass; 1 without token-level speculation.
    """

    mode: ModeName
    speedup: float
    depth: int = 0
    width: int = 0
    token_depth: int = 1


def best_settings(
    costs: MachineCosts, acceptance: Acceptance, *, tokens_by: Literal["draft_model", "ngram"] = "draft_model"
) -> list[Setting]:
    """The best setting of each mode, the fastest mode first.

    Steps are simulated on the decoder's own machine, with the measured cost of as many target steps at once as there
    are at each moment. With token-level speculation a pass of the target looks at γ₂ tokens for each step that is
    written, which costs what a batch of so many replies costs, and gains (1-α₂^γ₂)/(1-α₂) tokens. The passes
    of a target with a shared draft are simulated too: they look at what the draft, which has cores of its own, has
    written by then.

    Args:
        costs: What the pair costs here.
        acceptance: What is guessed right.
        tokens_by: Who guesses tokens: the draft model on the target's cores, or the text so far ("ngram", for nothing).
    """
    speed = partial(_token_speed, costs, acceptance, tokens_by)
    shared_draft = partial(_shared_draft_speed, costs, acceptance)
    best = [Setting("off", 1.0)]
    best.append(_best(Setting("sd", speed(alone=True, depth=depth)(1), token_depth=depth) for depth in TOKEN_DEPTHS))
    best.append(_best(_lookahead(costs, acceptance, speed(alone=False, depth=1), "lr", 1)))
    best.append(
        _best(
            setting
            for depth in TOKEN_DEPTHS
            for setting in _lookahead(costs, acceptance, speed(alone=False, depth=depth), "lr+sd", depth)
        )
    )
    best.append(
        _best(Setting("shared_draft", shared_draft(depth)(1), token_depth=depth) for depth in SHARED_DRAFT_DEPTHS)
    )
    best.append(
        _best(
            setting
            for depth in SHARED_DRAFT_DEPTHS
            for setting in _lookahead(costs, acceptance, shared_draft(depth), "lr+shared_draft", depth)
        )
    )
    return sorted(best, key=lambda setting: -setting.speedup)


def _best(settings: Iterable[Setting]) -> Setting:
    return max(settings, key=lambda setting: (round(setting.speedup, 3), -setting.depth * setting.width))


def _lookahead(
    costs: MachineCosts, acceptance: Acceptance, speed: Callable[[int], float], mode: ModeName, token_depth: int
) -> Iterable[Setting]:
    """Every depth and width of a mode.

    Args:
        costs: What the pair costs here.
        acceptance: What is guessed right.
        speed: Tokens per second of each of so many target steps at once, over those of the target by itself.
        mode: The mode.
        token_depth: γ₂.
    """
    for depth in DEPTHS:
        # A second candidate and draft tokens want the same room in a batch.
        for width in WIDTHS if token_depth == 1 else (1,):
            yield Setting(mode, _steps_speed(costs, acceptance, speed, depth, width), depth, width, token_depth)


def _steps_speed(
    costs: MachineCosts, acceptance: Acceptance, speed: Callable[[int], float], depth: int, width: int
) -> float:
    """Speed with steps ahead, simulated."""
    alone = costs.target.at(1) * acceptance.step_tokens
    durations = Durations(
        always(alone / speed(1)),
        always(costs.draft.at(width) * acceptance.step_tokens),
        always(acceptance.verifier),
        slowdown=lambda steps: speed(1) / speed(steps),
    )
    found = simulate(acceptance.steps, depth, durations, steps=_STEPS, width=width)
    return found.steps * alone / found.seconds


def predicted_speed(
    costs: MachineCosts, acceptance: Acceptance, mode: ModeName, depth: int, token_depth: int, replies: int = 1
) -> float:
    """Predicted speed of one way to write replies, against the target by itself with as many at once.

    Args:
        costs: What the pair costs here.
        acceptance: What is guessed right.
        mode: The way.
        depth: γ₁, where steps are speculated on.
        token_depth: γ₂, where tokens are.
        replies: How many are written at once, each of which has a share of every batch.
    """
    if replies > 1:
        costs = costs.shared_by(replies)
    if mode == "off":
        return 1.0
    if mode in ("shared_draft", "lr+shared_draft"):
        speed = _shared_draft_speed(costs, acceptance, token_depth)
    else:
        by_tokens = token_depth if mode != "lr" else 1
        speed = _token_speed(costs, acceptance, "draft_model", alone=mode == "sd", depth=by_tokens)
    return speed(1) if mode in ("sd", "shared_draft") else _steps_speed(costs, acceptance, speed, depth, 1)


def _token_speed(
    costs: MachineCosts, acceptance: Acceptance, tokens_by: str, *, alone: bool, depth: int
) -> Callable[[int], float]:
    """Tokens per second of each of so many replies at once, over those of the target by itself."""
    target = costs.target if alone else costs.beside
    share = costs.target.at(1) / target.at(1)  # the guessing model runs where the target does
    guess = costs.draft_alone.at(1) / share if tokens_by == "draft_model" else 0.0
    committed = sum(acceptance.tokens**position for position in range(depth))

    @cache
    def speed(steps: int) -> float:
        seconds = target.at(steps * depth) + guess * (depth - 1)
        return committed * costs.target.at(1) / seconds

    return speed


def _shared_draft_speed(costs: MachineCosts, acceptance: Acceptance, depth: int) -> Callable[[int], float]:
    """The same of a target with a shared draft.

    Args:
        costs: What the pair costs here.
        acceptance: What is guessed right.
        depth: γ₂: tokens of a step that a pass looks at, at most.
    """

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
