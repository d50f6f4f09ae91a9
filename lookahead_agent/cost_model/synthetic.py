"""The measurement of every mode at exact acceptance rates: its settings and its rows.

The speed of a pair does not depend on its words. Steps end by their number of tokens, the verifier draws the acceptance
of each draft step, and vLLM that of draft tokens: α and α₂ are exact, and the result can be compared with theory. All
replies have the same length.
"""

from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from lookahead_agent.cost_model.estimator import LOOKAHEAD, ModeName

Speculation = Literal["none", "draft_model", "shared_draft"]
"""How a target's engine speculates on tokens."""

SPECULATION: dict[ModeName, Speculation] = {
    "off": "none",
    "sd": "draft_model",
    "lr": "none",
    "lr+sd": "draft_model",
    "shared_draft": "shared_draft",
    "lr+shared_draft": "shared_draft",
}
STEPS_ONLY: tuple[ModeName, ...] = ("off", "lr")
"""Modes without token-level speculation."""
PROMPT_TOKENS = 128
_BLOCK = 16  # Tokens of a block of vLLM's cache on a GPU
_MOST_AT_ONCE = 64


@dataclass(frozen=True)
class Configuration:
    """A mode and its settings."""

    mode: ModeName
    depth: int  # steps ahead (γ₁); 0 without step speculation
    alpha: float  # probability that a draft step is accepted; 0 without step speculation
    replies: int  # at once


class SyntheticRow(BaseModel):
    """Measured replies of one config."""

    model_config = ConfigDict(extra="ignore")

    mode: ModeName
    depth: int
    alpha: float
    replies: int
    repeat: int  # number of the measurement, from 0
    seconds_per_token: float  # of the tokens after a reply's first, on average over the replies
    steps: int  # committed steps, without the last of each reply: no draft step is compared with it
    accepted: int  # draft steps among them
    judged: int  # steps among them that the verifier had judged
    late: int  # steps among them that the target wrote before the draft did, so that nothing was drawn
    passes: int  # forward passes of the target
    idle: float  # share of the time in which no engine and no verifier had work
    # By "target" and "draft": how many were "committed", "rejected", "aborted", "speculative"
    tokens: dict[str, dict[str, int]]
    settings: dict[str, Any] = Field(default_factory=dict)  # all else that determines the result
    environment: dict[str, Any] = Field(default_factory=dict)  # versions and hardware

    @property
    def key(self) -> tuple[Configuration, int]:
        """Configuration and number of the measurement."""
        return Configuration(self.mode, self.depth, self.alpha, self.replies), self.repeat


_Probability = Annotated[float, Field(ge=0, le=1)]
_Depth = Annotated[int, Field(ge=1, le=16)]


class SyntheticSettings(BaseModel):
    """Settings of a measurement."""

    model_config = ConfigDict(frozen=True)

    modes: tuple[ModeName, ...] = Field(tuple(SPECULATION), min_length=1)  # "off" is always among them
    alphas: tuple[_Probability, ...] = Field((0.4, 0.6, 0.8), min_length=1)  # that a draft step is accepted
    depths: tuple[_Depth, ...] = Field((1, 2, 4, 8), min_length=1)  # steps ahead
    replies: tuple[PositiveInt, ...] = Field((1,), min_length=1)  # replies at once
    step_tokens: PositiveInt = 32  # tokens of a step
    steps: int = Field(16, ge=2)  # steps of a reply
    token_alpha: _Probability = 0.7  # that a draft token is accepted, if those before it are
    draft_tokens: PositiveInt = 4  # draft tokens for each forward pass
    repeats: PositiveInt = 3  # measurements of each configuration
    seed: int = 0  # of the draws

    @property
    def tokens(self) -> int:
        """Of a reply."""
        return self.steps * self.step_tokens

    @property
    def batches(self) -> list[int]:
        """Sizes of batches whose costs a prediction needs, up to the most tokens of a forward pass."""
        ahead = max(self.depths) if set(self.modes) & set(LOOKAHEAD) else 1
        tokens = self.draft_tokens + 1 if set(self.modes) - set(STEPS_ONLY) else 1
        sizes = [1]
        while sizes[-1] < min(max(self.replies) * max(ahead, tokens), _MOST_AT_ONCE):
            sizes.append(4 * sizes[-1])
        return sizes

    @property
    def context(self) -> int:
        """Tokens of prompt and reply."""
        return PROMPT_TOKENS + self.tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens in an engine's cache at most: every reply, and what is written ahead of it."""
        ahead = max(self.depths) * (self.step_tokens + _BLOCK) if set(self.modes) & set(LOOKAHEAD) else 0
        return max(max(self.replies) * (self.context + ahead), _MOST_AT_ONCE * 2 * PROMPT_TOKENS)

    @property
    def measurements(self) -> list[tuple[Configuration, int]]:
        """Every configuration and number of its measurement, all configurations in turns."""
        found = []
        for mode in dict.fromkeys(("off", *self.modes)):
            depths = product(self.depths, self.alphas) if mode in LOOKAHEAD else [(0, 0.0)]
            found += [Configuration(mode, *shape, replies) for shape in depths for replies in self.replies]
        return [(config, repeat) for repeat in range(self.repeats) for config in found]
