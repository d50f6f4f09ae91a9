"""`bench synthetic`, in which random draws decide whether a step is accepted."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from lookahead_agent.cli.app import app
from lookahead_agent.cost_model.costs import BatchCosts, MachineCosts, measure
from lookahead_agent.cost_model.estimator import Acceptance, predict_speed
from lookahead_agent.cost_model.pair import PairMeasurement
from lookahead_agent.cost_model.synthetic import SyntheticConfiguration, SyntheticRow, SyntheticSettings, results
from lookahead_agent.cost_model.synthetic_bench import ChanceByPosition, SyntheticBench, synthetic_acceptance
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.verifier import StepPair
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.scripted import ScriptedTokenizer
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.system.progress import LogProgress
from tests.unit.conftest import MeasureWith

STEP = Step((1,), "x", StepEnd.DELIMITER)
SMALL = SyntheticSettings(modes=("off", "lr"), alphas=(0.5,), depths=(2,), step_tokens=4, steps=9, repeats=2)


class _OneTokenEngine:
    """Generates the only allowed token up to `max_tokens`; a target's token takes 20 turns of the event loop."""

    def __init__(self, tokenizer: ScriptedTokenizer, role: str) -> None:
        self._tokenizer = tokenizer
        self._role = role
        self.running = 0

    @property
    def tokenizer(self) -> ScriptedTokenizer:
        return self._tokenizer

    @property
    def context_length(self) -> int:
        return 4096

    @property
    def in_flight(self) -> int:
        return self.running

    @property
    def healthy(self) -> bool:
        return True

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        assert sampling.allowed_token_ids is not None
        self.running += 1
        try:
            for index in range(sampling.max_tokens):
                for _ in range(20 if self._role == "target" else 1):
                    await asyncio.sleep(0)
                last = index == sampling.max_tokens - 1
                yield Delta(sampling.allowed_token_ids, finish_reason="length" if last else None)
        finally:
            self.running -= 1

    def close(self) -> None:
        """The engine holds no resources."""


class ScriptedPair:
    """A pair of models that generate a token in a few turns of the event loop."""

    draft_folder = Path("small")
    draft_quantization: str | None = None
    every_core = "0-1"

    def __init__(self, divided: bool = True) -> None:
        self.divided = divided
        self.names = {"target": "big", "draft": "small"}
        self.arguments: dict[str, dict[str, Any]] = {"target": {}, "draft": {}}
        self.shares = {"target": "0", "draft": "1"}
        self.tokenizer = ScriptedTokenizer()
        self.tokenizer.encode("one two three four")
        self.started: list[tuple[str, str | None, dict[str, Any]]] = []
        self.open = 0
        self.fails = False
        self.fails_with: str | None = None

    @contextmanager
    def engine(self, role: str, cores: str | None, **arguments: Any) -> Iterator[_OneTokenEngine]:
        method = arguments.get("speculative_config", {}).get("method")
        if self.fails or (method is not None and method == self.fails_with):
            raise EngineError("no engine today")
        self.started.append((role, cores, arguments))
        self.open += 1
        yield _OneTokenEngine(self.tokenizer, role)
        self.open -= 1


def bench(pair: ScriptedPair, settings: SyntheticSettings, out: Path) -> SyntheticBench:
    return SyntheticBench(pair, settings, out)  # type: ignore[arg-type]


def test_steps_have_a_fixed_length_and_draws_decide_acceptance(tmp_path: Path) -> None:
    pair = ScriptedPair()
    benchmark = bench(pair, SMALL, tmp_path / "rows.jsonl")
    assert benchmark.total == 4
    assert benchmark.run(LogProgress())
    assert pair.open == 0
    rows = benchmark.rows()
    assert [(row.mode, row.repeat) for row in rows] == [("off", 0), ("lr", 0), ("off", 1), ("lr", 1)]
    for row in rows:
        assert row.tokens["target"]["committed"] + row.tokens["draft"]["committed"] == SMALL.tokens
        assert row.seconds_per_token > 0
    speculative = [row for row in rows if row.mode == "lr"]
    assert all(row.steps == SMALL.steps - 1 for row in speculative), "the last step is not counted"
    assert all(row.judged + row.late == row.steps for row in speculative)
    assert all(row.accepted <= row.judged for row in speculative)
    draws = [_accepted(row.repeat, position) for row in speculative for position in range(row.steps)]
    assert any(draws)
    assert not all(draws), "this seed accepts some steps and rejects others"
    assert [row.late for row in speculative] == [0, 0], "the draft is faster"
    assert [row.accepted for row in speculative] == [sum(draws[: SMALL.steps - 1]), sum(draws[SMALL.steps - 1 :])]
    assert _started(pair) == {("target", "0", None), ("draft", "1", None), ("target", "0-1", None)}


def _started(pair: ScriptedPair) -> set[tuple[str, str | None, str | None]]:
    """Role, cores and token speculation of each engine, as a set since engines start concurrently."""
    engines = [
        (role, cores, options.get("speculative_config", {}).get("method")) for role, cores, options in pair.started
    ]
    assert len(set(engines)) == len(engines), "each engine starts once"
    return set(engines)


def _accepted(repeat: int, position: int) -> bool:
    pair = StepPair(f"{repeat}.0", "", STEP, STEP, position)
    return asyncio.run(ChanceByPosition(0.5, SMALL.seed).verify(pair)).accepted


def test_interrupted_benchmark_resumes_and_rejects_other_settings(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert not bench(ScriptedPair(), SMALL, out).run(LogProgress(), seconds=1e-9)
    broken = ScriptedPair()
    broken.fails = True
    with pytest.raises(EngineError, match="no engine today"):
        bench(broken, SMALL, out).run(LogProgress())
    assert bench(ScriptedPair(), SMALL, out).run(LogProgress())
    lines = out.read_text().splitlines()
    out.write_text("\n".join(lines[:3]) + "\n" + lines[3][:40])
    resumed = ScriptedPair()
    assert bench(resumed, SMALL, out).run(LogProgress())
    assert len(out.read_text().splitlines()) == 4
    assert len({row.key for row in bench(ScriptedPair(), SMALL, out).rows()}) == 4
    with pytest.raises(ConfigurationError, match="results of other settings"):
        bench(ScriptedPair(), SyntheticSettings(modes=("off",), step_tokens=5), out)
    out.write_text(json.dumps({"kind": "sample"}) + "\n")
    with pytest.raises(ConfigurationError, match="other rows than of bench synthetic"):
        bench(ScriptedPair(), SMALL, out)


def test_each_engine_loads_once_for_all_modes(tmp_path: Path) -> None:
    settings = SyntheticSettings(
        alphas=(1.0,), depths=(1,), step_tokens=2, steps=2, repeats=2, token_alpha=0.5, draft_tokens=3
    )
    gpu = ScriptedPair(divided=False)
    benchmark = bench(gpu, settings, tmp_path / "gpu.jsonl")
    assert benchmark.run(LogProgress())
    targets = {("target", "0", method) for method in (None, "draft_model", "custom_class")}
    assert _started(gpu) == targets | {("draft", "1", None)}, "the modes off and lr share a target"
    (shared_draft,) = (
        arguments["speculative_config"]
        for *_, arguments in gpu.started
        if arguments.get("speculative_config", {}).get("method") == "custom_class"
    )
    assert shared_draft["synthetic_acceptance_rates"] == [0.5, 0.25, 0.125]
    assert shared_draft["num_speculative_tokens"] == 3
    modes = ["off", "sd", "lr", "lr+sd", "shared_draft", "lr+shared_draft"]
    assert [(row.mode, row.repeat) for row in benchmark.rows()] == [(mode, n) for n in (0, 1) for mode in modes]
    assert [result.config.mode for result in results(benchmark.rows(), settings, None)] == modes[1:]


def test_modes_whose_engine_fails_are_skipped_until_a_rerun(tmp_path: Path) -> None:
    settings = SyntheticSettings(alphas=(1.0,), depths=(1,), step_tokens=2, steps=2, repeats=1)
    out = tmp_path / "rows.jsonl"
    broken = ScriptedPair(divided=False)
    broken.fails_with = "custom_class"
    with pytest.raises(EngineError, match="shared_draft: no engine today"):
        bench(broken, settings, out).run(LogProgress())
    assert broken.open == 0
    benchmark = bench(ScriptedPair(divided=False), settings, out)
    assert [row.mode for row in benchmark.rows()] == ["off", "sd", "lr", "lr+sd"]
    assert benchmark.run(LogProgress())
    assert [row.mode for row in benchmark.rows()][4:] == ["shared_draft", "lr+shared_draft"], "a rerun resumes"


def test_timeout_of_a_measurement_ends_its_mode(tmp_path: Path) -> None:
    pair = ScriptedPair(divided=False)
    benchmark = SyntheticBench(pair, SMALL, tmp_path / "rows.jsonl", longest=1e-6)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"off: .*not done after 1e-06 s; lr: "):
        benchmark.run(LogProgress())
    assert benchmark.rows() == []


def test_costs_are_measured_once_and_with_loaded_engines_if_possible(tmp_path: Path) -> None:
    open_count: list[int] = []
    for modes in (("off", "lr"), ("sd",)):
        pair = ScriptedPair(divided="lr" in modes)
        settings = SyntheticSettings(modes=modes, alphas=(1.0,), depths=(1,), step_tokens=2, steps=2, repeats=1)
        out = tmp_path / f"{modes[-1]}.jsonl"
        assert not bench(pair, settings, out).run(LogProgress(), 1e-9, lambda: open_count.append(-1))
        assert bench(pair, settings, out).run(LogProgress(), None, lambda pair=pair: open_count.append(pair.open))
        assert bench(pair, settings, out).run(LogProgress(), None, lambda: open_count.append(-2)), "only costs are left"
    assert open_count == [3, -2, 0, -2]


def test_batch_sizes_follow_from_depths_draft_tokens_and_replies() -> None:
    assert SyntheticSettings(modes=("off", "lr"), depths=(1, 2, 4)).batches == [1, 4]
    assert SyntheticSettings(modes=("off", "lr"), depths=(2,), replies=(1, 3)).batches == [1, 4, 16]
    assert SyntheticSettings(modes=("sd",), depths=(16,), draft_tokens=4).batches == [1, 4, 16]
    assert SyntheticSettings(depths=(8,), replies=(32,)).batches[-1] == 64, "64 is the largest batch"


def test_token_speculation_is_rejected_where_vllm_cannot_draw_it(tmp_path: Path) -> None:
    pair = ScriptedPair()
    with pytest.raises(ConfigurationError, match=r"which sd, shared_draft would need: choose the modes off,lr"):
        bench(pair, SyntheticSettings(modes=("sd", "lr", "shared_draft")), tmp_path / "rows.jsonl")


def test_quantization_of_the_draft_reaches_vllm(tmp_path: Path) -> None:
    pair = ScriptedPair(divided=False)
    pair.draft_quantization = "some"
    settings = SyntheticSettings(modes=("sd",), alphas=(1.0,), depths=(1,), step_tokens=2, steps=2, repeats=1)
    assert bench(pair, settings, tmp_path / "rows.jsonl").run(LogProgress())
    assert pair.started[0][2]["speculative_config"]["quantization"] == "some"


@given(st.floats(0, 1), st.integers(0, 5))
def test_share_of_accepted_draws_is_alpha(alpha: float, seed: int) -> None:
    verifier = ChanceByPosition(alpha, seed)

    async def share() -> float:
        verdicts = [await verifier.verify(StepPair("q", "", STEP, STEP, position)) for position in range(1500)]
        return sum(verdict.accepted for verdict in verdicts) / len(verdicts)

    assert asyncio.run(share()) == pytest.approx(alpha, abs=0.08)


@given(st.floats(0, 1), st.integers(1, 8))
def test_synthetic_acceptance_rates_are_probabilities_that_never_rise(alpha: float, draft_tokens: int) -> None:
    rates = synthetic_acceptance(alpha, draft_tokens)["synthetic_acceptance_rates"]
    assert len(rates) == draft_tokens
    assert all(0 <= later <= earlier <= 1 for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modes": ()}, "modes"),
        ({"modes": ("fast",)}, "'off', 'sd', 'shared_draft'"),
        ({"alphas": (1.2,)}, "less than or equal to 1"),
        ({"token_alpha": -0.1}, "greater than or equal to 0"),
        ({"depths": (0,)}, "greater than or equal to 1"),
        ({"replies": ()}, "at least 1"),
        ({"steps": 1}, "greater than or equal to 2"),
    ],
)
def test_invalid_settings_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SyntheticSettings(**fields)


def _row(mode: str, seconds_per_token: float, repeat: int = 0, **changes: Any) -> SyntheticRow:
    speculation = {"depth": 2, "alpha": 0.5} if mode == "lr" else {"depth": 0, "alpha": 0.0}
    token_counts = {"committed": 10, "rejected": 0, "aborted": 0, "speculative": 0}
    counts = {"steps": 10, "accepted": 4, "judged": 8, "late": 2, "passes": 5, "idle": 0.01, "replies": 1}
    fields = {
        "mode": mode,
        "seconds_per_token": seconds_per_token,
        "repeat": repeat,
        "tokens": {"target": token_counts, "draft": token_counts},
    }
    return SyntheticRow.model_validate(fields | speculation | counts | changes)


COSTS = MachineCosts(
    target=BatchCosts(seconds={1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}),
    beside=BatchCosts(seconds={1: 2.0, 2: 2.0, 4: 2.0, 8: 2.0}),
    draft=BatchCosts(seconds={1: 0.5, 2: 0.5}),
    draft_alone=BatchCosts(seconds={1: 0.25, 2: 0.5}),
)


def test_results_pair_repeats_with_the_baseline_and_have_a_prediction() -> None:
    rows = [_row("off", 1.0), _row("lr", 0.5), _row("off", 3.0, 1), _row("lr", 1.0, 1), _row("lr", 9.0, 2)]
    (result,) = results(rows, SMALL, COSTS)
    assert result.config == SyntheticConfiguration("lr", 2, 0.5, 1)
    assert (result.speed, result.least, result.most) == (2.5, 2.0, 3.0)
    assert result.alpha == 0.5
    assert result.late == 0.2
    assert result.tokens_per_pass == 2.0
    assert result.predicted == predict_speed(COSTS, Acceptance(0.5, 0.7, 4), "lr", 2, 5)
    assert next(results(rows, SMALL, None)).predicted is None


def test_predicted_speed_of_each_mode() -> None:
    half = Acceptance(0.0, 0.5, 10)
    assert predict_speed(COSTS, half, "off", 0, 1) == 1
    # Two draft tokens of 0.25 s each, a forward pass of 1 s, and 1.75 tokens.
    assert predict_speed(COSTS, half, "sd", 0, 3) == pytest.approx(1.75 / 1.5)
    assert predict_speed(COSTS, half, "lr", 4, 3) == pytest.approx(0.5, rel=0.01), "nothing accepted, half the cores"
    assert predict_speed(COSTS, Acceptance(1.0, 0.5, 10), "lr", 8, 3) == pytest.approx(2.0, rel=0.03), "draft-bound"
    assert predict_speed(COSTS, half, "lr+sd", 4, 3) == pytest.approx(0.5 * 1.75 / 1.5, rel=0.02)
    assert predict_speed(COSTS, half, "shared_draft", 0, 5) > 0.5
    slow = COSTS.model_copy(update={"beside": BatchCosts(seconds={1: 2.0, 8: 16.0})})
    every_step = Acceptance(1.0, 0.5, 10)
    assert predict_speed(slow, every_step, "lr", 4, 3, replies=2) < predict_speed(COSTS, every_step, "lr", 4, 3)


def test_bench_synthetic_command(tmp_path: Path, measure_with: MeasureWith) -> None:
    pair: Any = ScriptedPair()
    measure_with(PairMeasurement(lambda *_, **__: pair, lambda *_, **__: COSTS))
    costs, out = tmp_path / "costs.json", tmp_path / "rows.jsonl"
    command = ["bench", "synthetic", "--modes", "lr", "--alphas", "0.5", "--depths", "2", "--step-tokens", "4"]
    command += ["--steps", "9", "--repeats", "1", "--out", str(out)]
    measured = CliRunner().invoke(app, [*command, "--seconds", "600", "--costs", str(costs)])
    assert measured.exit_code == 0, measured.output
    assert costs.exists()
    assert "lr" in measured.output
    rerun = CliRunner().invoke(app, [*command, "--costs", str(costs), "--json"])
    (result,) = json.loads(rerun.stdout)
    alpha = result["alpha"]
    assert 0 < alpha < 1
    assert result["predicted"] == pytest.approx(predict_speed(COSTS, Acceptance(alpha, 0.7, 4), "lr", 2, 5))
    report = tmp_path / "reports" / "cpu.md"
    assert CliRunner().invoke(app, [*command, "--costs", str(costs), "--report", str(report)]).exit_code == 0
    markdown = report.read_text()
    assert "big with small" in markdown
    assert "| lr | 1 | 2 | 0.5 |" in markdown
    assert "| target alone | 1000.0 |" in markdown
    assert "![speed by depth](cpu.svg)" in markdown
    assert report.with_suffix(".svg").read_text().startswith("<svg")
    wrong_suffix = CliRunner().invoke(app, [*command, "--report", "cpu.pdf"])
    assert "cpu.pdf" in str(wrong_suffix.exception)
    command[-1] = str(tmp_path / "more.jsonl")
    unfinished = CliRunner().invoke(app, [*command, "--repeats", "1000", "--seconds", "1"])
    assert unfinished.exit_code == 75
    assert re.search(r"\b\d{1,3} of 2000 rows are in", unfinished.output), unfinished.output
    for option, value in (("--precision", "int3"), ("--depths", "2.5"), ("--replies", ","), ("--alphas", "half")):
        invalid = CliRunner().invoke(app, [*command, option, value])
        assert invalid.exit_code == 2
        assert value in invalid.output


class _TwoRequestEngine(_OneTokenEngine):
    """Runs two requests at once; further ones wait."""

    def __init__(self, tokenizer: ScriptedTokenizer) -> None:
        super().__init__(tokenizer, "target")
        self._room = asyncio.Semaphore(2)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        async with self._room:
            async for delta in super().generate(prompt_ids, sampling):
                yield delta


def test_batches_that_do_not_run_concurrently_have_no_cost() -> None:
    tokenizer = ScriptedTokenizer()
    tokenizer.encode("one two three four")
    costs = asyncio.run(measure(_TwoRequestEngine(tokenizer), (1, 2, 4, 8)))
    assert list(costs.seconds) == [1, 2]
