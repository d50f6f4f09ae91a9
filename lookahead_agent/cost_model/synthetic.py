"""The benchmark of every mode at exact acceptance rates: its settings, its rows, and their results as tables.

Steps end after a fixed number of tokens. The verifier draws whether it accepts a draft step, and vLLM draws for draft
tokens. So α and α₂ are exact, and the results comparable with theory. All replies have the same length.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from lookahead_agent.bench.pictures import Bar, Panel, new_figure, save
from lookahead_agent.bench.report import BaseReport, as_markdown, check_report_name, machine_of, versions_of
from lookahead_agent.cost_model.costs import MachineCosts
from lookahead_agent.cost_model.estimator import Acceptance, predict_speed
from lookahead_agent.errors import ConfigurationError, validation_message
from lookahead_agent.modes.table import LOOKAHEAD, METHODS, EngineMode
from lookahead_agent.system.files import writable, write_atomically
from lookahead_agent.trace.node_times import Table

STEPS_ONLY: tuple[EngineMode, ...] = ("off", "lr")  # modes without token-level speculation
PROMPT_TOKENS = 128
_BLOCK = 16  # tokens of a block of vLLM's KV cache on a GPU
_MAX_CONCURRENCY = 64


@dataclass(frozen=True)
class SyntheticConfiguration:
    """A mode and its settings."""

    mode: EngineMode
    depth: int  # steps ahead (γ₁); 0 without step speculation
    alpha: float  # probability that a draft step is accepted; 0 without step speculation
    replies: int  # concurrent ones


class SyntheticRow(BaseModel):
    """One measurement of a configuration's replies."""

    mode: EngineMode
    depth: int
    alpha: float
    replies: int
    repeat: int  # number of the measurement, from 0
    seconds_per_token: float  # of the tokens after a reply's first, mean over the replies
    steps: int  # committed steps, without the last of each reply, which no draft step is compared with
    accepted: int  # draft steps among them
    judged: int  # steps among them that the verifier had judged
    late: int  # steps among them that the target completed before the draft, so that nothing was drawn
    passes: int  # forward passes of the target
    idle: float  # share of the time in which no engine or verifier had work
    # Numbers of "committed", "rejected", "aborted" and "speculative" tokens, by "target" and "draft"
    tokens: dict[str, dict[str, int]]
    settings: dict[str, Any] = Field(default_factory=dict)  # everything else that determines the result
    environment: dict[str, Any] = Field(default_factory=dict)  # versions and hardware

    @property
    def key(self) -> tuple[SyntheticConfiguration, int]:
        """The configuration, and the number of the measurement."""
        return SyntheticConfiguration(self.mode, self.depth, self.alpha, self.replies), self.repeat


_Probability = Annotated[float, Field(ge=0, le=1)]
_Depth = Annotated[int, Field(ge=1, le=16)]


class SyntheticSettings(BaseModel):
    """Settings of the benchmark."""

    model_config = ConfigDict(frozen=True)

    modes: tuple[EngineMode, ...] = Field(tuple(METHODS), min_length=1)  # "off" is always among them
    alphas: tuple[_Probability, ...] = Field((0.4, 0.6, 0.8), min_length=1)  # that a draft step is accepted
    depths: tuple[_Depth, ...] = Field((1, 2, 4, 8), min_length=1)  # steps ahead
    replies: tuple[PositiveInt, ...] = Field((1,), min_length=1)  # concurrent replies
    step_tokens: PositiveInt = 32  # tokens of a step
    steps: int = Field(16, ge=2)  # steps of a reply
    token_alpha: _Probability = 0.7  # that a draft token is accepted after accepted ones
    draft_tokens: PositiveInt = 4  # draft tokens for each forward pass
    repeats: PositiveInt = 3  # measurements of each configuration
    seed: int = 0  # of the draws

    @property
    def tokens(self) -> int:
        """Tokens of a reply."""
        return self.steps * self.step_tokens

    @property
    def batches(self) -> list[int]:
        """Batch sizes whose costs a prediction needs, up to the tokens of the largest forward pass."""
        ahead = max(self.depths) if set(self.modes) & set(LOOKAHEAD) else 1
        tokens = self.draft_tokens + 1 if set(self.modes) - set(STEPS_ONLY) else 1
        sizes = [1]
        while sizes[-1] < min(max(self.replies) * max(ahead, tokens), _MAX_CONCURRENCY):
            sizes.append(4 * sizes[-1])
        return sizes

    @property
    def context(self) -> int:
        """Tokens of prompt and reply."""
        return PROMPT_TOKENS + self.tokens

    @property
    def cached_tokens(self) -> int:
        """The most tokens in an engine's KV cache: every reply, and the steps drafted ahead of it."""
        ahead = max(self.depths) * (self.step_tokens + _BLOCK) if set(self.modes) & set(LOOKAHEAD) else 0
        return max(max(self.replies) * (self.context + ahead), _MAX_CONCURRENCY * 2 * PROMPT_TOKENS)

    @property
    def measurements(self) -> list[tuple[SyntheticConfiguration, int]]:
        """Every configuration with each number of its measurement; configurations take turns."""
        configurations = []
        for mode in dict.fromkeys(("off", *self.modes)):
            depths = product(self.depths, self.alphas) if mode in LOOKAHEAD else [(0, 0.0)]
            configurations += [
                SyntheticConfiguration(mode, *shape, replies) for shape in depths for replies in self.replies
            ]
        return [(config, repeat) for repeat in range(self.repeats) for config in configurations]


@dataclass(frozen=True)
class SyntheticResult:
    """Measured and predicted speed of a configuration."""

    config: SyntheticConfiguration
    speed: float  # relative to the target alone with as many concurrent replies: median over repeats
    least: float  # minimum over repeats
    most: float  # maximum over repeats
    predicted: float | None  # simulated with the measured costs and the drawn acceptance rate; None: no costs
    alpha: float | None  # share of the draws that accepted; None: no draws
    late: float  # share of the steps that the target completed before the draft
    tokens_per_pass: float  # of the target
    idle: float  # share of the time in which no engine or verifier had work


def results(
    rows: Sequence[SyntheticRow], settings: SyntheticSettings, costs: MachineCosts | None
) -> Iterator[SyntheticResult]:
    """Compare each configuration with the target alone in the same repeat; `costs` are for the prediction."""
    alone = {(row.replies, row.repeat): row.seconds_per_token for row in rows if row.mode == "off"}
    by_configuration: dict[SyntheticConfiguration, list[SyntheticRow]] = {}
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
        # The drawn share differs from the probability by chance, and the prediction uses the drawn share.
        drawn = sum(row.accepted for row in measured) / judged if judged else None
        acceptance = Acceptance(config.alpha if drawn is None else drawn, settings.token_alpha, settings.step_tokens)
        shape = config.depth, settings.draft_tokens + 1, config.replies
        yield SyntheticResult(
            config,
            statistics.median(speeds),
            min(speeds),
            max(speeds),
            predict_speed(costs, acceptance, config.mode, *shape) if costs else None,
            drawn,
            sum(row.late for row in measured) / steps if steps else 0.0,
            generated / max(sum(row.passes for row in measured), 1),
            statistics.mean(row.idle for row in measured),
        )


def result_table(measured: Sequence[SyntheticResult]) -> Table:
    """Measured and predicted speed of each configuration, relative to the target alone."""
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
        for one in measured
    ]
    return headings, rows


class SyntheticReport(BaseReport):
    """The report of rows of the benchmark; rows of several variants have a table each.

    Raises ConfigurationError if a row is invalid, or no configuration ran beside the target alone.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        by_variant: dict[str, list[SyntheticRow]] = {}
        for number, row in enumerate(rows, 1):
            try:
                by_variant.setdefault(str(row.get("variant", "")), []).append(SyntheticRow.model_validate(row))
            except ValidationError as error:
                raise ConfigurationError(f"row {number} is invalid: {validation_message(error)}") from error
        self._first = next(iter(by_variant.values()))[0]
        try:
            settings = SyntheticSettings.model_validate(self._first.settings)
        except ValidationError as error:
            raise ConfigurationError(f"the settings of the rows are invalid: {validation_message(error)}") from error
        self._results = {name: list(results(known, settings, None)) for name, known in by_variant.items()}
        if not any(self._results.values()):
            raise ConfigurationError("the rows have no configuration beside the target alone")

    def conditions(self) -> str:
        """Describe models, machine and versions."""
        return _conditions(self._first)

    def sections(self) -> list[tuple[str, list[Table]]]:
        """Return the table of each variant."""
        return [(name, [result_table(measured)]) for name, measured in self._results.items()]

    def records(self) -> list[dict[str, Any]]:
        """Return the figures of each configuration."""
        return [
            # The acceptance rate that was drawn has its own name beside the probability.
            {"variant": name} | asdict(result.config) | {"drawn": result.alpha} | _without(result, "config", "alpha")
            for name, measured in self._results.items()
            for result in measured
        ]

    def panels(self) -> list[Panel]:
        """Return a panel of speeds for each variant."""
        return [
            Panel(f"{name}: speed against off".removeprefix(": "), [_bar(result) for result in measured])
            for name, measured in self._results.items()
            if measured
        ]


def _without(result: SyntheticResult, *names: str) -> dict[str, Any]:
    return {name: value for name, value in vars(result).items() if name not in names}


def _bar(result: SyntheticResult) -> Bar:
    shape = f" depth {result.config.depth} α {result.config.alpha:g}" if result.config.depth else ""
    label = f"{result.config.mode}{shape}" + (f" × {result.config.replies}" if result.config.replies > 1 else "")
    return Bar(label, result.speed, result.least, result.most)


def _conditions(row: SyntheticRow) -> str:
    """Describe models, machine, versions and settings of a row."""
    settings, environment = row.settings, row.environment
    names = settings["models"]
    return (
        f"{names['target']} with {names['draft']}; {machine_of(environment)}; {versions_of(environment)}. "
        f"Replies of {settings['steps']} steps of "
        f"{settings['step_tokens']} tokens; draft tokens are accepted with probability {settings['token_alpha']:g}, "
        f"{settings['draft_tokens']} for a pass. Speed is of the tokens after the first, against the target alone."
    )


def write_synthetic_report(
    file: Path, rows: Sequence[SyntheticRow], measured: Sequence[SyntheticResult], costs: MachineCosts | None
) -> None:
    """Write a Markdown report, with a picture beside it; `costs` are None if they were not measured."""
    check_report_name(file)
    parts = [
        f"# Synthetic benchmark: {file.stem}\n",
        f"{_conditions(rows[0])}\n",
        as_markdown(result_table(measured)),
    ]
    if costs is not None:
        parts += [f"c = {costs.c:.2f}.\n", as_markdown(costs.table())]
    svg = file.with_suffix(".svg")
    has_lookahead = any(result.config.depth for result in measured)
    if has_lookahead:
        parts.append(f"![speed by depth]({svg.name})\n\n*Speed by depth; dashed: predicted.*\n")
    with writable(file):
        if has_lookahead:
            write_atomically(svg, _picture(measured))
        write_atomically(file, "\n".join(parts))


def _picture(measured: Sequence[SyntheticResult]) -> bytes:
    """Plot speed by depth as an SVG element, identical for identical results."""
    panels = list(dict.fromkeys((point.config.mode, point.config.replies) for point in measured if point.config.depth))
    figure = new_figure((3.6 * len(panels), 3.4))
    columns = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for (mode, replies), axes in zip(panels, columns, strict=True):
        group = [point for point in measured if (point.config.mode, point.config.replies) == (mode, replies)]
        for alpha in sorted({point.config.alpha for point in group}):
            line = sorted((point for point in group if point.config.alpha == alpha), key=lambda p: p.config.depth)
            depths = [point.config.depth for point in line]
            spread = [[point.speed - point.least for point in line], [point.most - point.speed for point in line]]
            drawn = axes.errorbar(depths, [point.speed for point in line], spread, marker="o", label=f"α = {alpha:g}")
            known = [(point.config.depth, point.predicted) for point in line if point.predicted is not None]
            if known:
                axes.plot(*zip(*known, strict=True), "--", color=drawn.lines[0].get_color())
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        suffix = f", {replies} at once" if replies > 1 else ""
        axes.set(title=f"{mode}{suffix}", xlabel="steps ahead", xticks=sorted({point.config.depth for point in group}))
        axes.legend(frameon=False, fontsize=8)
    columns[0].set_ylabel("speed against the target alone")
    return save(figure, ".svg")
