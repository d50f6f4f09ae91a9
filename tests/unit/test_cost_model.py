"""Measured batch costs, and the settings that are predicted to be fastest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.problems import Problem
from lookahead_agent.cost_model.costs import BatchCosts, MachineCosts, measure
from lookahead_agent.cost_model.estimator import Acceptance, best_settings
from lookahead_agent.cost_model.pair import PairMeasurement, choose_kernels, measure_acceptance
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models import choose_models
from lookahead_agent.modes.table import EngineMode
from lookahead_agent.runtime.engine_selection import EngineSetup, RuntimeSpec
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.theory.formulas import shared_draft_speedup
from tests.unit.chat import reply_script, scripted_engines
from tests.unit.conftest import MeasureWith
from tests.unit.test_cli import run


def speedup_by_mode(costs: MachineCosts, acceptance: Acceptance, *modes: EngineMode) -> dict[str, float]:
    """The speedups of some modes: those that a test looks at, since all of them take seconds."""
    return {setting.mode: setting.speedup for setting in best_settings(costs, acceptance, modes)}


class MeteredEngine:
    """Simulates 10 ms per token on its own clock. Each concurrent reply adds 2 ms."""

    def __init__(self) -> None:
        self.tokenizer = ScriptedTokenizer()
        self.tokenizer.encode("some words to have tokens")
        self.context_length = 512
        self.healthy = True
        self.in_flight = 0
        self.now = 0.0
        self.peak_in_flight = 0
        self._turn = asyncio.Event()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        assert len(prompt_ids) + sampling.max_tokens <= self.context_length
        assert sampling.allowed_token_ids
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            for number in range(sampling.max_tokens):
                # All replies of a batch get their next token at the same time.
                self.now += (0.010 + 0.002 * (self.in_flight - 1)) / self.in_flight
                yield Delta(sampling.allowed_token_ids, None, "length" if number + 1 == sampling.max_tokens else None)
                await asyncio.sleep(0)
        finally:
            self.in_flight -= 1

    def close(self) -> None:
        """Do nothing."""


async def test_measure_returns_seconds_per_token_by_batch_size() -> None:
    engine = MeteredEngine()
    costs = await measure(engine, (1, 2, 4), now=lambda: engine.now)
    assert engine.peak_in_flight == 4
    assert engine.in_flight == 0
    assert costs.seconds[1] == pytest.approx(0.010, rel=0.02)
    assert costs.seconds[2] == pytest.approx(0.012, rel=0.1)
    assert costs.seconds[4] == pytest.approx(0.016, rel=0.1)


async def test_batches_that_do_not_run_at_once_have_no_cost() -> None:
    engine = MeteredEngine()
    room = asyncio.Semaphore(2)

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        async with room:
            async for delta in MeteredEngine.generate(engine, prompt_ids, sampling):
                yield delta

    engine.generate = generate  # type: ignore[method-assign]
    costs = await measure(engine, (1, 2, 4, 8), now=lambda: engine.now)
    assert list(costs.seconds) == [1, 2]


async def test_measure_runs_one_request_on_the_other_engine_and_aborts_it() -> None:
    engine, other = MeteredEngine(), MeteredEngine()
    await measure(engine, (1,), beside=other, now=lambda: engine.now)
    assert other.peak_in_flight == 1
    assert other.in_flight == 0


async def test_measure_refuses_a_context_that_is_too_short() -> None:
    engine = MeteredEngine()
    engine.context_length = 10
    with pytest.raises(ConfigurationError, match="10 tokens is too short"):
        await measure(engine)


def test_batch_costs_are_interpolated_and_extrapolated() -> None:
    costs = BatchCosts(seconds={1: 0.1, 3: 0.12, 7: 0.24})
    assert costs.at(1) == 0.1
    assert costs.at(2) == pytest.approx(0.11)
    assert costs.at(5) == pytest.approx(0.18)
    assert costs.at(11) == pytest.approx(0.36)
    assert costs.free_batch(0.25) == 3
    assert BatchCosts(seconds={1: 0.1}).at(9) == 0.1
    with pytest.raises(ValueError, match="begin with a batch of 1"):
        BatchCosts(seconds={2: 0.1})


def flat(seconds: float) -> BatchCosts:
    return BatchCosts(seconds={1: seconds, 16: seconds})


FREE = MachineCosts(target=flat(0.1), beside=flat(0.1), draft=flat(0.01), draft_alone=flat(0.01))
"""The paper's assumptions: batching is free and neither engine slows the other down."""

SMALL = MachineCosts(
    target=BatchCosts(seconds={1: 0.12, 4: 0.14, 8: 0.2, 16: 0.35}),
    beside=BatchCosts(seconds={1: 0.21, 4: 0.25, 8: 0.4, 16: 0.7}),
    draft=BatchCosts(seconds={1: 0.07, 4: 0.08, 8: 0.12, 16: 0.2}),
    draft_alone=BatchCosts(seconds={1: 0.04, 16: 0.1}),
)
"""A machine with two cores: a running draft takes one of them from the target."""


def test_step_and_token_speculation_win_together_under_the_papers_assumptions() -> None:
    ordered = best_settings(FREE, Acceptance(0.8, 0.7))
    settings = {setting.mode: setting for setting in ordered}
    assert ordered[0].mode == "lr+sd"
    assert len(settings) == len(get_args(EngineMode))
    assert settings["off"].speedup == 1
    assert settings["lr"].speedup > 2.5
    assert settings["lr"].depth >= 4


def test_token_speculation_alone_wins_on_two_cores() -> None:
    speedups = speedup_by_mode(SMALL, Acceptance(0.6, 0.8), *get_args(EngineMode))
    assert speedups["sd"] > 1.3
    assert speedups["lr"] < 1
    assert max(speedups, key=lambda mode: speedups[mode]) == "sd"


def test_shared_draft_wins_only_where_the_draft_does_not_slow_the_target() -> None:
    free = speedup_by_mode(FREE, Acceptance(0.0, 0.8), "sd", "shared_draft", "lr+shared_draft")
    assert free["shared_draft"] > free["sd"] > 1
    assert free["shared_draft"] <= shared_draft_speedup(0.8, FREE.c)
    assert free["lr+shared_draft"] <= 1.05 * free["shared_draft"], "no step is accepted"
    small = speedup_by_mode(SMALL, Acceptance(0.0, 0.8), "sd", "shared_draft")
    assert small["shared_draft"] < small["sd"], "the target lacks the core that the draft uses"
    paraphrased = speedup_by_mode(FREE, Acceptance(0.9, 0.3), "shared_draft", "lr+shared_draft")
    assert paraphrased["lr+shared_draft"] > 1.5 * paraphrased["shared_draft"]


def test_slow_verdicts_reduce_the_speedup() -> None:
    fast, slow = (speedup_by_mode(FREE, Acceptance(0.8, 0.0, 40, seconds), "lr") for seconds in (0.0, 3.0))
    assert slow["lr"] < fast["lr"]


@pytest.mark.parametrize("token_alpha", [0.0, 0.7])
def test_higher_token_acceptance_never_lowers_the_speedup(token_alpha: float) -> None:
    acceptances = Acceptance(0.0, token_alpha), Acceptance(0.0, token_alpha + 0.1)
    lower, higher = (speedup_by_mode(FREE, acceptance, "sd", "lr") for acceptance in acceptances)
    assert higher["sd"] >= lower["sd"] - 1e-9
    assert lower["lr"] <= 1.05, "no step is accepted"


def engines_with_logprobs() -> EngineSet:
    """Return engines whose draft is confident in the first two of three steps."""
    engines = scripted_engines(lambda _: "One.\n\nTwo.\n\nThree.")
    tokenizer = engines.target.tokenizer
    assert isinstance(tokenizer, ScriptedTokenizer)
    logprobs = {"One": -0.1, "Two": -0.6, "Three": -0.8}  # the last probability is below one half
    engines.draft = ScriptedEngine(tokenizer, reply_script(lambda _: "One.\n\nTwo.\n\nThree."), logprobs=logprobs)
    return engines


def test_acceptance_is_measured_on_problems() -> None:
    llm = ChatLookahead(engines=engines_with_logprobs(), policy="balanced", streaming=True, return_token_ids=True)
    reply = llm.invoke("What?").response_metadata["token_ids"]
    acceptance = measure_acceptance(llm, [Problem("a", "What?", None), Problem("b", "Which?", None)])
    assert acceptance.steps == 1
    assert acceptance.tokens == pytest.approx(2 / len(reply))
    assert acceptance.step_tokens == pytest.approx(len(reply) / 3)
    assert acceptance.verifier >= 0


def test_estimate_reads_measured_costs_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    file.write_text(SMALL.model_dump_json())
    arguments = ["estimate", "--costs", str(file), "--alpha", "0.6", "--token-alpha", "0.8"]
    assert run(*arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert run(*arguments) == 0
    assert result["settings"][0]["mode"] == "sd"
    assert result["c"] == pytest.approx(1 / 3)
    printed = capsys.readouterr().out
    assert "--token-speculation draft_model" in printed
    assert "c = 0.33" in printed


def test_estimate_measures_costs_once_and_stores_them(
    tmp_path: Path, measure_with: MeasureWith, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def pair(model: str, draft: str | None, **options: Any) -> Any:
        calls.append({"model": model, "draft": draft, **options})

    file = tmp_path / "deep" / "costs.json"
    arguments = ["estimate", "--dummy-weights", "--alpha", "0.6", "--token-alpha", "0.8", "--costs", str(file)]
    measure_with(PairMeasurement(pair=pair, costs=lambda *_, **__: FREE))
    for _ in range(2):
        assert run(*arguments, "--engine-arg", "max_model_len=2048") == 0
    assert len(calls) == 1, "the second run reads the file"
    assert calls[0]["dummy_weights"] is True
    assert calls[0]["engine_args"] == {"max_model_len": 2048}
    assert MachineCosts.model_validate_json(file.read_text()) == FREE
    capsys.readouterr()


@pytest.mark.parametrize(
    ("precisions", "dummy", "kernels"),
    [
        (("auto", "auto"), False, ["int8", "bf16"]),
        (("fp32", "auto"), False, ["fp32", "bf16"]),
        (("fp32", "fp32"), False, ["fp32", "fp32"]),
        ((None, None), False, [None, None]),
        (("auto", "auto"), True, [None, None]),
    ],
)
def test_pair_is_measured_with_the_precisions_of_engine_selection(
    precisions: tuple[Any, Any], dummy: bool, kernels: list[str | None]
) -> None:
    requests: list[RuntimeSpec] = []

    def select(request: RuntimeSpec, target: Path, draft: Path) -> EngineSetup:
        requests.append(request)
        assert (target, draft) == (Path("big"), Path("small"))
        return EngineSetup(precision={"target": "int8", "draft": "bf16"})

    chosen = choose_kernels(
        choose_models("qwen2.5-coder-1.5b"),
        {"target": precisions[0], "draft": precisions[1]},
        {"max_model_len": 99},
        {"target": Path("big"), "draft": Path("small")},
        dummy,
        select,
    )
    assert list(chosen.values()) == kernels
    assert len(requests) == (not dummy and "auto" in precisions)
    assert all(request.target_arguments == {"max_model_len": 99} for request in requests)


def test_estimate_measures_acceptance_greedily_with_a_draft_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constructed: list[dict[str, Any]] = []

    def chat(**fields: Any) -> ChatLookahead:
        constructed.append(fields)
        return ChatLookahead(engines=engines_with_logprobs(), policy="balanced", streaming=True, return_token_ids=True)

    costs = tmp_path / "costs.json"
    costs.write_text(SMALL.model_dump_json())
    assert run("estimate", "--costs", str(costs), chat_class=chat) == 0
    assert [fields["temperature"] for fields in constructed] == [0.0]
    assert all(fields["policy"].forces_speculation for fields in constructed), "otherwise no draft engine would start"
    assert "α = 1.00, of tokens 0.22; 3 tokens a step" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dummy-weights"], "--alpha"),
        (["--dummy-weights", "--alpha", "0.5"], "--token-alpha"),
        (["--alpha", "2"], "--alpha"),
        (["--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--policy", "off"], "accepts no step"),
        (["--costs", __file__, "--alpha", "0.5", "--token-alpha", "0.5"], "no measured costs"),
    ],
)
def test_estimate_refuses_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("estimate", *arguments) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
