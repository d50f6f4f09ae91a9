"""Speed alone: every config, with models whose words mean nothing and acceptance that is drawn.

How fast a pair writes does not depend on what it says. So steps end by their number of tokens, whether a draft step is
accepted is drawn for each position of a reply, and how many draft tokens are is drawn by vLLM: α and α₂ are exact,
and what is measured can be held against theory. All replies are as long as each other.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lookahead_agent.bench.environment import environment
from lookahead_agent.cost_model.costs import MachineCosts, always_the_same, meaningless_prompt
from lookahead_agent.cost_model.estimator import Acceptance, ModeName, predicted_speed
from lookahead_agent.cost_model.pair import Pair
from lookahead_agent.decoding import DecodingSettings, ReplyRequest, StepEvent, lookahead
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines import background
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.token_speculation import speculative_config
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.jsonl import RowFile
from lookahead_agent.progress import Progress
from lookahead_agent.verifiers.random_accept import draw

Speculation = Literal["none", "draft_model", "shared_draft"]
"""How a target's engine speculates on tokens."""

_SPECULATION: dict[ModeName, Speculation] = {
    "off": "none",
    "lr": "none",
    "sd": "draft_model",
    "lr+sd": "draft_model",
    "shared_draft": "shared_draft",
    "lr+shared_draft": "shared_draft",
}
STEPS_ONLY: tuple[ModeName, ...] = ("off", "lr")
"""Modes without token-level speculation."""
_LOOKAHEAD: tuple[ModeName, ...] = ("lr", "lr+sd", "lr+shared_draft")
_PROMPT_TOKENS = 128
_BLOCK = 16
"""Tokens of a block of vLLM's cache on a GPU."""
_PROMPTS = 1 << 24
_MOST_AT_ONCE = 64


@dataclass(frozen=True)
class Configuration:
    """One configuration that is measured.

    Attributes:
        mode: As of the benchmark.
        depth: Steps ahead (γ₁); 0 without.
        alpha: Probability that a draft step is accepted; 0 where none is written.
        replies: At once.
    """

    mode: ModeName
    depth: int
    alpha: float
    replies: int


class SyntheticRow(BaseModel):
    """Measured replies of one config.

    Attributes:
        mode: As of `Configuration`, as of the next three.
        depth: Steps ahead.
        alpha: Probability of acceptance.
        replies: At once.
        repeat: Number of the measurement, from 0.
        seconds_per_token: Of the tokens after a reply's first, on average over the replies.
        steps: Committed, but for the last of each reply, which no draft step is held against.
        accepted: Those of them that the draft wrote.
        judged: Those about which the verifier had decided.
        late: Those that the target wrote before the draft did, so that nothing was drawn.
        passes: How often a target gave tokens.
        idle: Share of the time in which no engine and no verifier had work.
        tokens: Of "target" and "draft": how many were "committed", "rejected", "aborted", "speculative".
        settings: Everything else that determines the result.
        environment: Versions and hardware.
    """

    model_config = ConfigDict(extra="ignore")

    mode: ModeName
    depth: int
    alpha: float
    replies: int
    repeat: int
    seconds_per_token: float
    steps: int
    accepted: int
    judged: int
    late: int
    passes: int
    idle: float
    tokens: dict[str, dict[str, int]]
    settings: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> tuple[Configuration, int]:
        """Configuration and number of the measurement."""
        return Configuration(self.mode, self.depth, self.alpha, self.replies), self.repeat


@dataclass(frozen=True)
class SyntheticSettings:
    """Settings of a measurement.

    Attributes:
        modes: Modes of generation; "off" is always measured too.
        alphas: Probabilities that a draft step is accepted.
        depths: Steps ahead.
        replies: Replies at once.
        step_tokens: Tokens of a step.
        steps: Steps of a reply.
        token_alpha: Probability that a draft token is accepted, if those before it are.
        draft_tokens: Draft tokens for each forward pass.
        repeats: Measurements of each config.
        seed: Of what is drawn.
        apart: Whether the target alone is loaded after the pair instead of beside it, where cores are divided.

    Raises:
        ConfigurationError: A value out of its range.
    """

    modes: tuple[ModeName, ...] = ("off", "sd", "lr", "lr+sd", "shared_draft", "lr+shared_draft")
    alphas: tuple[float, ...] = (0.4, 0.6, 0.8)
    depths: tuple[int, ...] = (1, 2, 4, 8)
    replies: tuple[int, ...] = (1,)
    step_tokens: int = 32
    steps: int = 16
    token_alpha: float = 0.7
    draft_tokens: int = 4
    repeats: int = 3
    seed: int = 0
    apart: bool = False

    def __post_init__(self) -> None:
        if not self.modes or set(self.modes) - set(_SPECULATION):
            raise ConfigurationError(f"modes are some of {', '.join(_SPECULATION)}")
        if not self.alphas or not all(0 <= rate <= 1 for rate in (*self.alphas, self.token_alpha)):
            raise ConfigurationError("acceptance rates are probabilities, from 0 to 1")
        if not self.depths or not all(1 <= depth <= 16 for depth in self.depths):
            raise ConfigurationError("depths are from 1 to 16")
        if (
            not self.replies
            or min(*self.replies, self.step_tokens, self.draft_tokens, self.repeats) < 1
            or self.steps < 2
        ):
            raise ConfigurationError(
                "replies, tokens of a step, draft tokens and repeats are at least 1, steps of a reply at least 2"
            )

    @property
    def tokens(self) -> int:
        """Of a reply."""
        return self.steps * self.step_tokens

    @property
    def batches(self) -> list[int]:
        """Sizes of batches whose costs a prediction needs, up to the most tokens of a forward pass."""
        ahead = max(self.depths) if set(self.modes) - {"off", "sd", "shared_draft"} else 1
        tokens = self.draft_tokens + 1 if set(self.modes) - set(STEPS_ONLY) else 1
        sizes = [1]
        while sizes[-1] < min(max(self.replies) * max(ahead, tokens), _MOST_AT_ONCE):
            sizes.append(4 * sizes[-1])
        return sizes

    def configurations(self, mode: ModeName) -> list[Configuration]:
        """All configurations of a mode."""
        if mode in ("off", "sd", "shared_draft"):
            return [Configuration(mode, 0, 0.0, replies) for replies in self.replies]
        return [Configuration(mode, *rest) for rest in product(self.depths, self.alphas, self.replies)]

    @property
    def context(self) -> int:
        """Tokens of prompt and reply."""
        return _PROMPT_TOKENS + self.tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens in an engine's cache at most: every reply, and what is written ahead of it."""
        ahead = max(self.depths) * (self.step_tokens + _BLOCK) if set(self.modes) & set(_LOOKAHEAD) else 0
        return max(max(self.replies) * (self.context + ahead), _MOST_AT_ONCE * 2 * _PROMPT_TOKENS)

    @property
    def turns(self) -> list[list[tuple[Configuration, int]]]:
        """Measurements by the engines that are loaded together, all configurations in turns."""
        off: list[ModeName] = ["off"]
        others: list[ModeName] = [mode for mode in dict.fromkeys(self.modes) if mode != "off"]
        groups = [off, others] if self.apart else [off + others]
        return [
            [
                (config, repeat)
                for repeat in range(self.repeats)
                for mode in modes
                for config in self.configurations(mode)
            ]
            for modes in groups
        ]


class ChanceByPosition:
    """Accepts by a draw for each position of a reply, independent of the steps.

    Args:
        alpha: Probability of acceptance, in [0, 1].
        seed: Of the draws: the same positions are accepted in each config.
    """

    def __init__(self, alpha: float, seed: int) -> None:
        self._alpha = alpha
        self._seed = seed

    async def verify(self, pair: StepPair) -> Verdict:
        """Draw for a pair."""
        drawn = draw(self._seed, pair.question, pair.position)
        return Verdict(drawn < self._alpha, "drawn", drawn)


def synthetic_acceptance(token_alpha: float, draft_tokens: int) -> dict[str, Any]:
    """vLLM settings that accept draft tokens by chance, each with this probability if those before it are accepted.

    Args:
        token_alpha: The probability (α₂), in [0, 1].
        draft_tokens: Draft tokens for each forward pass, at most.

    Returns:
        Entries of `speculative_config`.
    """
    rates = [token_alpha**position for position in range(1, draft_tokens + 1)]
    return {
        "num_speculative_tokens": draft_tokens,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }


class SyntheticBench:
    """A measurement; nothing is loaded yet.

    Args:
        pair: The models.
        settings: The settings.
        out: Where rows are, or will be.
        longest: Seconds after which a measurement is taken to have failed.

    Raises:
        ConfigurationError: `out` has rows of other settings, or something else; or a mode cannot be measured here.
    """

    def __init__(self, pair: Pair, settings: SyntheticSettings, out: Path, longest: float = 600.0) -> None:
        self._pair = pair
        self._settings = settings
        self._file = RowFile(out)
        self._longest = longest
        self._recorded = {
            "models": pair.names,
            "arguments": pair.arguments,
            "step_tokens": settings.step_tokens,
            "steps": settings.steps,
            "token_alpha": settings.token_alpha,
            "draft_tokens": settings.draft_tokens,
            "seed": settings.seed,
        }
        tokens = [mode for mode in settings.modes if mode not in STEPS_ONLY]
        if tokens and not pair.draws_tokens:
            raise ConfigurationError(
                f"vLLM's CPU build does not draw whether draft tokens are accepted, which {', '.join(tokens)} would "
                f"need: choose the modes {','.join(STEPS_ONLY)}"
            )
        if any(row.settings != self._recorded for row in self.rows()):
            raise ConfigurationError(f"{out} has results of other settings: choose another file")

    def rows(self) -> list[SyntheticRow]:
        """The rows that are measured so far.

        Raises:
            ConfigurationError: It is something else.
        """
        try:
            return [SyntheticRow.model_validate(row) for row in self._file.rows]
        except ValidationError as error:
            raise ConfigurationError(f"{self._file.path} has other rows than of bench synthetic: {error}") from error

    @property
    def total(self) -> int:
        """How many rows it has in the end."""
        return sum(map(len, self._settings.turns))

    def missing(self) -> list[list[tuple[Configuration, int]]]:
        """Measurements that are left, by the engines that are loaded together."""
        known = {row.key for row in self.rows()}
        left = [[each for each in turn if each not in known] for turn in self._settings.turns]
        return [turn for turn in left if turn]

    def run(
        self, progress: Progress, seconds: float | None = None, measure_costs: Callable[[], None] | None = None
    ) -> bool:
        """Measure what is not there yet.

        Args:
            progress: Told how far it is.
            seconds: After which no other measurement is begun; None: all are.
            measure_costs: Called once, where the engines that it needs are loaded if they ever are.

        Returns:
            Whether everything is measured.

        Raises:
            EngineError: Engines failed; the modes that do without them have been measured, and a rerun goes on.
        """
        end = float("inf") if seconds is None else time.monotonic() + seconds
        failures: dict[str, EngineError] = {}
        with self._file.writing():
            for turn in self.missing():
                if time.monotonic() >= end:
                    return False
                with ExitStack() as stack:
                    engines = _Engines(self._pair, {config.mode for config, _ in turn}, self._settings, stack)
                    failures |= engines.failures
                    beside = engines.draft is not None and "none" in engines.targets and not self._settings.apart
                    if measure_costs is not None and beside:
                        measure_costs()
                        measure_costs = None
                    with progress.task("Measuring", len(turn)) as task:
                        for done, (config, repeat) in enumerate(turn, 1):
                            if time.monotonic() >= end:
                                return False
                            if engines.has(config.mode) and config.mode not in failures:
                                try:
                                    row = background.run(self._measure(engines, config, repeat))
                                except EngineError as error:
                                    failures[config.mode] = error
                                else:
                                    self._file.append(row.model_dump(mode="json"))
                            task.advance(done)
        if failures:
            raise EngineError("; ".join(f"{name}: {error}" for name, error in failures.items()))
        if measure_costs is not None:
            measure_costs()
        return True

    async def _measure(self, engines: _Engines, config: Configuration, repeat: int) -> SyntheticRow:
        target = engines.target(config.mode)
        draft = engines.draft if config.mode not in ("off", "sd") else None
        settings = DecodingSettings(
            depth=config.depth,
            step_tokens=self._settings.step_tokens,
            shared_draft=config.mode in ("shared_draft", "lr+shared_draft"),
        )
        positions: list[dict[str, set[int]]] = [defaultdict(set) for _ in range(config.replies)]  # by kind of event

        async def write(number: int) -> Any:
            name = f"{repeat}.{number}"
            # Different prompts, or the prefix cache would make all but one for nothing.
            prompt = meaningless_prompt(target, _PROMPT_TOKENS, int(_PROMPTS * draw(name, config)))
            request = ReplyRequest(tuple(prompt), always_the_same(target, self._settings.tokens), question=name)
            verifier = ChanceByPosition(config.alpha, self._settings.seed) if config.depth else None

            def see(event: StepEvent) -> None:
                positions[number][event.kind].add(event.position)

            return await lookahead(request, target, draft, verifier, settings, on_step=see)

        try:
            async with asyncio.timeout(self._longest):
                replies = await background.all_of(map(write, range(config.replies)))
        except TimeoutError as error:
            raise EngineError(f"a measurement of {config.mode} was not done after {self._longest:g} s") from error
        reports = [reply.report for reply in replies]
        last = {self._settings.steps - 1}
        drafts, targets, judged = (
            [of_reply[kind] - last for of_reply in positions] for kind in ("accepted", "committed", "judged")
        )
        return SyntheticRow(
            mode=config.mode,
            depth=config.depth,
            alpha=config.alpha,
            replies=config.replies,
            repeat=repeat,
            seconds_per_token=statistics.mean(
                (r.seconds["total"] - r.seconds["first"]) / (self._settings.tokens - 1) for r in reports
            ),
            steps=sum(len(d) + len(t) for d, t in zip(drafts, targets, strict=True)),
            accepted=sum(map(len, drafts)),
            judged=sum(len(j & (d | t)) for j, d, t in zip(judged, drafts, targets, strict=True)),
            late=sum(len(t - j) for t, j in zip(targets, judged, strict=True)) if config.depth else 0,
            passes=sum(r.target_forward_passes for r in reports),
            idle=statistics.mean(r.seconds["waiting"] / r.seconds["total"] for r in reports),
            tokens={
                role: {
                    fate: sum(getattr(getattr(r, f"{role}_tokens"), fate) for r in reports)
                    for fate in ("committed", "rejected", "aborted", "speculative")
                }
                for role in ("target", "draft")
            },
            settings=self._recorded,
            environment=environment(),
        )


class _Engines:
    """The engines that some modes need, started at the same time."""

    def __init__(self, pair: Pair, modes: set[ModeName], settings: SyntheticSettings, stack: ExitStack) -> None:
        self.failures: dict[str, EngineError] = {}
        wanted: dict[str, AbstractContextManager[Engine]] = {}
        for kind in sorted({_SPECULATION[mode] for mode in modes - {"off"}}):
            wanted[kind] = pair.engine("target", pair.shares["target"], **_token_level(kind, pair, settings))
        if "off" in modes and (pair.divided or "none" not in wanted):
            wanted["alone"] = pair.engine("target", pair.every_core)
        if modes - {"off", "sd"}:
            wanted["draft"] = pair.engine("draft", pair.shares["draft"])
        with ThreadPoolExecutor(len(wanted)) as starting:
            started = {name: starting.submit(engine.__enter__) for name, engine in wanted.items()}
        found: dict[str, Engine] = {}
        for name, future in started.items():
            error = future.exception()
            if error is None:
                stack.push(wanted[name].__exit__)
                found[name] = future.result()
            elif isinstance(error, EngineError):
                self.failures[name] = error
        for future in started.values():
            if (error := future.exception()) is not None and not isinstance(error, EngineError):
                raise error
        self.draft = found.pop("draft", None)
        self._alone = found.pop("alone", found.get("none"))
        self.targets = found

    def target(self, mode: ModeName) -> Engine:
        """The target that writes in a mode."""
        found = self._alone if mode == "off" else self.targets[_SPECULATION[mode]]
        assert found is not None
        return found

    def has(self, mode: ModeName) -> bool:
        """Whether the engines of a mode have started."""
        if mode == "off":
            return self._alone is not None
        return _SPECULATION[mode] in self.targets and (mode == "sd" or self.draft is not None)


def _token_level(kind: Speculation, pair: Pair, settings: SyntheticSettings) -> dict[str, Any]:
    """Engine arguments of a target that speculates on tokens in this config."""
    if kind == "none":
        return {}
    chance = synthetic_acceptance(settings.token_alpha, settings.draft_tokens)
    if kind == "shared_draft":
        return {
            "speculative_config": speculative_config({"method": "shared_draft"} | chance, None, on_cpu=pair.divided)
        }
    config = speculative_config({"method": "draft_model"} | chance, pair.draft_folder, on_cpu=pair.divided)
    assert config is not None
    if pair.draft_quantization is not None:
        config["quantization"] = pair.draft_quantization
    return {"speculative_config": config}


@dataclass(frozen=True)
class SyntheticResult:
    """Measured and predicted speed of a config.

    Attributes:
        config: The config.
        measured: How many times it was.
        speed: Against the target alone with as many replies at once: median over repeats.
        least: The least of them.
        most: The largest.
        predicted: By simulation with the costs that were measured and the share that was accepted; None: no costs.
        alpha: Share of the steps that were drawn for that were accepted; None: none was.
        late: Share of the steps that the target wrote before the draft did.
        tokens_per_pass: Of the target, over those that it was for.
        idle: Share of the time in which nothing had work.
    """

    config: Configuration
    measured: int
    speed: float
    least: float
    most: float
    predicted: float | None
    alpha: float | None
    late: float
    tokens_per_pass: float
    idle: float


def results(
    rows: Sequence[SyntheticRow], settings: SyntheticSettings, costs: MachineCosts | None
) -> Iterator[SyntheticResult]:
    """Each configuration against the target alone, in the same repeat.

    Args:
        rows: The measured rows.
        settings: The settings of the measurement.
        costs: Costs of the pair, for the prediction.
    """
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
        # A few draws may be luckier than they should be, which is no merit of the config.
        drawn = sum(row.accepted for row in measured) / judged if judged else None
        acceptance = Acceptance(config.alpha if drawn is None else drawn, settings.token_alpha, settings.step_tokens)
        yield SyntheticResult(
            config,
            len(speeds),
            statistics.median(speeds),
            min(speeds),
            max(speeds),
            predicted_speed(
                costs,
                acceptance,
                config.mode,
                config.depth,
                settings.draft_tokens + 1,
                config.replies,
            )
            if costs
            else None,
            drawn,
            sum(row.late for row in measured) / steps if steps else 0.0,
            generated / max(sum(row.passes for row in measured), 1),
            statistics.mean(row.idle for row in measured),
        )
