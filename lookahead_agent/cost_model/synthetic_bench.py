"""Measures the speed of every mode, with meaningless text and drawn acceptance."""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lookahead_agent.bench.samples import environment
from lookahead_agent.cost_model import synthetic
from lookahead_agent.cost_model.costs import fix_length, synthetic_prompt
from lookahead_agent.cost_model.pair import Pair
from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, StepEvent, lookahead
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.vllm_config import speculative_config
from lookahead_agent.errors import ConfigurationError, EngineError, validation_message
from lookahead_agent.modes.table import METHODS, EngineMode, SpeculationMethod
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile
from lookahead_agent.system.progress import Progress
from lookahead_agent.verifiers.model_free import hash_to_unit_interval

_PROMPTS = 1 << 24  # number of prompts to draw from


class ChanceByPosition:
    """Accepts with a fixed probability, by one draw per position of a reply, equal in every configuration."""

    def __init__(self, alpha: float, seed: int) -> None:
        self._alpha = alpha
        self._seed = seed

    async def verify(self, pair: StepPair) -> Verdict:
        """Draw the verdict on a pair."""
        drawn = hash_to_unit_interval(self._seed, pair.question, pair.position)
        return Verdict(drawn < self._alpha, "drawn", drawn)


def synthetic_acceptance(token_alpha: float, draft_tokens: int) -> dict[str, Any]:
    """Entries of vLLM's `speculative_config`: a draft token after accepted ones is accepted with probability α₂."""
    rates = [token_alpha**position for position in range(1, draft_tokens + 1)]
    drawn = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return {"num_speculative_tokens": draft_tokens, **drawn}


class _Engines:
    """The engines that some modes need, started concurrently."""

    def __init__(
        self, pair: Pair, modes: set[EngineMode], settings: synthetic.SyntheticSettings, stack: ExitStack
    ) -> None:
        self.failures: dict[str, EngineError] = {}
        contexts: dict[str, AbstractContextManager[Engine]] = {}
        for kind in sorted({METHODS[mode] for mode in modes - {"off"}}):
            contexts[kind] = pair.engine("target", pair.shares["target"], **_token_level(kind, pair, settings))
        if "off" in modes and (pair.divided or "none" not in contexts):
            contexts["alone"] = pair.engine("target", pair.every_core)
        if modes - {"off", "sd"}:
            contexts["draft"] = pair.engine("draft", pair.shares["draft"])
        with ThreadPoolExecutor(len(contexts)) as executor:
            futures = {name: executor.submit(stack.enter_context, engine) for name, engine in contexts.items()}
        running: dict[str, Engine] = {}
        for name, future in futures.items():
            try:
                running[name] = future.result()
            except EngineError as error:
                self.failures[name] = error
        self.draft = running.get("draft")
        self.measures_costs = self.draft is not None and "none" in running  # whether they can measure the pair's costs
        targets = {mode: running.get(METHODS[mode]) for mode in modes}
        targets |= {"off": running.get("alone", running.get("none"))} if "off" in modes else {}
        # The target engine of each mode whose engines have all started.
        self.targets = {
            mode: target
            for mode, target in targets.items()
            if target is not None and (mode in ("off", "sd") or self.draft is not None)
        }


def _token_level(kind: SpeculationMethod, pair: Pair, settings: synthetic.SyntheticSettings) -> dict[str, Any]:
    if kind == "none":
        return {}
    method = {"method": kind} | synthetic_acceptance(settings.token_alpha, settings.draft_tokens)
    config = speculative_config(
        method, pair.draft_folder, on_cpu=pair.divided, draft_quantization=pair.draft_quantization
    )
    return {"speculative_config": config}


@dataclass(eq=False)
class SyntheticBench:
    """A measurement into a file of rows; `run` loads the engines."""

    pair: Pair
    settings: synthetic.SyntheticSettings
    out: Path
    longest: float = 600.0  # timeout of one measurement in seconds

    def __post_init__(self) -> None:
        pair, settings = self.pair, self.settings
        self._file = RowFile(self.out)
        shared = settings.model_dump(include={"step_tokens", "steps", "token_alpha", "draft_tokens", "seed"})
        self._recorded = {"models": pair.names, "arguments": pair.arguments, **shared}
        tokens = [mode for mode in settings.modes if mode not in synthetic.STEPS_ONLY]
        if tokens and pair.divided:
            problem = (
                f"vLLM's CPU build does not draw whether draft tokens are accepted, which {', '.join(tokens)} would"
            )
            raise ConfigurationError(f"{problem} need: choose the modes {','.join(synthetic.STEPS_ONLY)}")
        if any(row.settings != self._recorded for row in self.rows()):
            raise ConfigurationError(f"{self.out} has results of other settings: choose another file")

    def rows(self) -> list[synthetic.SyntheticRow]:
        """The rows measured so far; raises ConfigurationError if the file holds others."""
        try:
            return [synthetic.SyntheticRow.model_validate(row) for row in self._file.rows]
        except ValidationError as error:
            reason = validation_message(error)
            raise ConfigurationError(f"{self._file.path} has other rows than of bench synthetic: {reason}") from error

    @property
    def total(self) -> int:
        """The number of rows of the whole measurement."""
        return len(self.settings.measurements)

    def run(
        self, progress: Progress, seconds: float | None = None, measure_costs: Callable[[], None] | None = None
    ) -> bool:
        """Measure the missing rows, and return whether everything is measured; a rerun continues after a failure.

        No measurement starts after `seconds`. `measure_costs` is called once, if possible while the engines that it
        needs are loaded. Raises EngineError at the end if an engine has failed, which ends its modes only.
        """
        end = float("inf") if seconds is None else time.monotonic() + seconds
        failures: dict[str, EngineError] = {}
        known = {row.key for row in self.rows()}
        missing = [key for key in self.settings.measurements if key not in known]
        with self._file.open_for_writing(), ExitStack() as stack:
            if missing and time.monotonic() >= end:
                return False
            if missing:
                engines = _Engines(self.pair, {config.mode for config, _ in missing}, self.settings, stack)
                failures |= engines.failures
                if measure_costs is not None and engines.measures_costs:
                    measure_costs()
                    measure_costs = None
                with progress.task("Measuring", len(missing)) as advance:
                    for done, (config, repeat) in enumerate(missing, 1):
                        if time.monotonic() >= end:
                            return False
                        try:
                            if config.mode in engines.targets and config.mode not in failures:
                                row = background.run(self._measure(engines, config, repeat))
                                self._file.append(row.model_dump(mode="json"))
                        except EngineError as error:
                            failures[config.mode] = error
                        advance(done)
        if failures:
            raise EngineError("; ".join(f"{name}: {error}" for name, error in failures.items()))
        if measure_costs is not None:
            measure_costs()
        return True

    async def _measure(
        self, engines: _Engines, config: synthetic.SyntheticConfiguration, repeat: int
    ) -> synthetic.SyntheticRow:
        target = engines.targets[config.mode]
        draft = engines.draft if config.mode not in ("off", "sd") else None
        settings = DecodingSettings(
            depth=config.depth,
            step_tokens=self.settings.step_tokens,
            shared_draft=config.mode in ("shared_draft", "lr+shared_draft"),
        )
        positions: list[dict[str, set[int]]] = [defaultdict(set) for _ in range(config.replies)]  # by kind of event

        async def write(number: int) -> Reply:
            name = f"{repeat}.{number}"
            # Different prompts, since equal ones would hit the prefix cache.
            prompt = synthetic_prompt(
                target, synthetic.PROMPT_TOKENS, int(_PROMPTS * hash_to_unit_interval(name, config))
            )
            request = ReplyRequest(tuple(prompt), fix_length(target, self.settings.tokens), question=name)
            verifier = ChanceByPosition(config.alpha, self.settings.seed) if config.depth else None

            def record(event: StepEvent) -> None:
                positions[number][event.kind].add(event.position)

            return await lookahead(request, target, draft, verifier, settings, on_step=record)

        try:
            async with asyncio.timeout(self.longest):
                replies = await background.gather_or_cancel(map(write, range(config.replies)))
        except TimeoutError as error:
            raise EngineError(f"a measurement of {config.mode} was not done after {self.longest:g} s") from error
        reports = [reply.report for reply in replies]
        last = {self.settings.steps - 1}
        drafts, targets, judged = (
            [by_kind[kind] - last for by_kind in positions] for kind in ("accepted", "committed", "judged")
        )
        return synthetic.SyntheticRow(
            **asdict(config),
            repeat=repeat,
            seconds_per_token=statistics.mean(report.pace(self.settings.tokens) for report in reports),
            steps=sum(len(d) + len(t) for d, t in zip(drafts, targets, strict=True)),
            accepted=sum(map(len, drafts)),
            judged=sum(len(j & (d | t)) for j, d, t in zip(judged, drafts, targets, strict=True)),
            late=sum(len(t - j) for t, j in zip(targets, judged, strict=True)) if config.depth else 0,
            passes=sum(report.target_forward_passes for report in reports),
            idle=statistics.mean(report.seconds["waiting"] / report.seconds["total"] for report in reports),
            tokens={
                role: {
                    fate: sum(getattr(getattr(report, f"{role}_tokens"), fate) for report in reports)
                    for fate in ("committed", "rejected", "aborted", "speculative")
                }
                for role in ("target", "draft")
            },
            settings=self._recorded,
            environment=environment(),
        )
