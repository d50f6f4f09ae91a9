"""The measurement of every mode at exact acceptance rates: its settings, its rows, and their results as tables.

Steps end by their number of tokens, the verifier draws the acceptance of each draft step, and vLLM that of draft
tokens: α and α₂ are exact, and the result can be compared with theory. All replies have the same length.
"""

import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from lookahead_agent.bench.report import Table, as_markdown, check_report_name, machine_of, versions_of
from lookahead_agent.cost_model.costs import MachineCosts
from lookahead_agent.cost_model.estimator import LOOKAHEAD, Acceptance, ModeName, predicted_speed
from lookahead_agent.errors import extra_imports
from lookahead_agent.models.cache import writable, write_whole

Speculation = Literal["none", "draft_model", "shared_draft"]  # how a target's engine speculates on tokens

SPECULATION: dict[ModeName, Speculation] = {
    "off": "none",
    "sd": "draft_model",
    "lr": "none",
    "lr+sd": "draft_model",
    "shared_draft": "shared_draft",
    "lr+shared_draft": "shared_draft",
}
STEPS_ONLY: tuple[ModeName, ...] = ("off", "lr")  # modes without token-level speculation
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


@dataclass(frozen=True)
class SyntheticResult:
    """Measured and predicted speed of a configuration."""

    config: Configuration
    speed: float  # against the target alone with as many replies at once: median over repeats
    least: float  # the least of them
    most: float  # the largest
    predicted: float | None  # by simulation with the measured costs and the drawn acceptance; None: no costs
    alpha: float | None  # share of the draws that accepted; None: no draw
    late: float  # share of the steps that the target wrote before the draft did
    tokens_per_pass: float  # of the target
    idle: float  # share of the time in which nothing had work


def results(
    rows: Sequence[SyntheticRow], settings: SyntheticSettings, costs: MachineCosts | None
) -> Iterator[SyntheticResult]:
    """Each configuration against the target alone, in the same repeat; `costs` are for the prediction."""
    alone = {(row.replies, row.repeat): row.seconds_per_token for row in rows if row.mode == "off"}
    by_configuration: dict[Configuration, list[SyntheticRow]] = {}
    for row in rows:
        if row.mode != "off":
            by_configuration.setdefault(row.key[0], []).append(row)
    for config, measured in by_configuration.items():
        bases = [alone.get((row.replies, row.repeat)) for row in measured]
        speeds = [base / row.seconds_per_token for row, base in zip(measured, bases, strict=True) if base is not None]
        if not speeds:
            continue
        judged, steps = sum(row.judged for row in measured), sum(row.steps for row in measured)
        generated = sum(sum(row.tokens["target"].values()) for row in measured)
        # The drawn share differs from the probability by chance: the prediction takes the drawn one.
        drawn = sum(row.accepted for row in measured) / judged if judged else None
        acceptance = Acceptance(config.alpha if drawn is None else drawn, settings.token_alpha, settings.step_tokens)
        shape = config.depth, settings.draft_tokens + 1, config.replies
        yield SyntheticResult(
            config,
            statistics.median(speeds),
            min(speeds),
            max(speeds),
            predicted_speed(costs, acceptance, config.mode, *shape) if costs else None,
            drawn,
            sum(row.late for row in measured) / steps if steps else 0.0,
            generated / max(sum(row.passes for row in measured), 1),
            statistics.mean(row.idle for row in measured),
        )


def result_table(found: Sequence[SyntheticResult]) -> Table:
    """Measured and predicted speed of each configuration against the target alone."""
    headings = ["mode", "replies", "depth", "α", "drawn", "late", "speed (least to most)"]
    headings += ["predicted", "of predicted", "tokens per pass", "idle"]
    rows = [
        [
            one.config.mode,
            str(one.config.replies),
            str(one.config.depth or ""),
            f"{one.config.alpha:g}" if one.config.depth else "",
            f"{one.alpha:.2f}" if one.alpha is not None else "",
            f"{one.late:.0%}" if one.config.depth else "",
            f"{one.speed:.2f} ({one.least:.2f} to {one.most:.2f})",
            *([f"{one.predicted:.2f}", f"{one.speed / one.predicted:.2f}"] if one.predicted is not None else ["", ""]),
            f"{one.tokens_per_pass:.2f}",
            f"{one.idle:.1%}",
        ]
        for one in found
    ]
    return headings, rows


def write_synthetic_report(
    file: Path, rows: Sequence[SyntheticRow], found: Sequence[SyntheticResult], costs: MachineCosts | None
) -> None:
    """Write a Markdown report, with a picture beside it; `costs` are None where they are not measured."""
    check_report_name(file)
    settings, environment = rows[0].settings, rows[0].environment
    names = settings["models"]
    where = f"{machine_of(environment)}; {versions_of(environment)}"
    parts = [
        f"# Synthetic benchmark: {file.stem}\n",
        f"{names['target']} with {names['draft']}; {where}. Replies of {settings['steps']} steps of "
        f"{settings['step_tokens']} tokens; draft tokens are accepted with probability {settings['token_alpha']:g}, "
        f"{settings['draft_tokens']} for a pass. Speed is of the tokens after the first, against the target alone.\n",
        as_markdown(result_table(found)),
    ]
    if costs is not None:
        parts += [f"c = {costs.c:.2f}.\n", as_markdown(costs.table())]
    svg = file.with_suffix(".svg")
    looked_ahead = any(one.config.depth for one in found)
    if looked_ahead:
        parts.append(f"![speed by depth]({svg.name})\n\n*Speed by depth; dashed: predicted.*\n")
    with writable(file):
        if looked_ahead:
            write_whole(svg, _picture(found))
        write_whole(file, "\n".join(parts))


def _picture(found: Sequence[SyntheticResult]) -> str:
    """Speed by depth as an SVG element, the same for the same results."""
    panels = list(dict.fromkeys((one.config.mode, one.config.replies) for one in found if one.config.depth))
    with extra_imports("pictures need Matplotlib: pip install 'lookahead-agent[bench]'"):
        import matplotlib
        from matplotlib.figure import Figure
    figure = Figure(figsize=(3.6 * len(panels), 3.4), layout="constrained")
    squares = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for (mode, replies), axes in zip(panels, squares, strict=True):
        of_panel = [one for one in found if (one.config.mode, one.config.replies) == (mode, replies)]
        for alpha in sorted({one.config.alpha for one in of_panel}):
            line = sorted((one for one in of_panel if one.config.alpha == alpha), key=lambda one: one.config.depth)
            depths = [one.config.depth for one in line]
            spread = [[one.speed - one.least for one in line], [one.most - one.speed for one in line]]
            drawn = axes.errorbar(depths, [one.speed for one in line], spread, marker="o", label=f"α = {alpha:g}")
            known = [(one.config.depth, one.predicted) for one in line if one.predicted is not None]
            if known:
                axes.plot(*zip(*known, strict=True), "--", color=drawn.lines[0].get_color())
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        at_once = f", {replies} at once" if replies > 1 else ""
        axes.set(title=f"{mode}{at_once}", xlabel="steps ahead", xticks=sorted({one.config.depth for one in of_panel}))
        axes.legend(frameon=False, fontsize=8)
    squares[0].set_ylabel("speed against the target alone")
    file = io.StringIO()
    # Text stays text: smaller than outlines, and found by a search.
    with matplotlib.rc_context({"svg.hashsalt": "lookahead-agent", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    return file.getvalue()[file.getvalue().index("<svg") :]
