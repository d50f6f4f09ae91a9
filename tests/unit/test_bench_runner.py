"""Benchmarks alternate between configurations, record each sample, and resume after an interruption."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.config import (
    MODES,
    BenchConfig,
    TaskConfig,
    TaskConfiguration,
    chat_model,
    configurations_of,
    load_config,
    make_config,
    packaged_configs,
    template_policies,
)
from lookahead_agent.bench.runner import Bench
from lookahead_agent.bench.samples import Sample
from lookahead_agent.errors import ConfigurationError, EngineError, PolicyError
from lookahead_agent.system.jsonl import RowFile
from tests.unit.bench_models import scripted_configuration
from tests.unit.chat import scripted_chat

OFF_AND_LR = BenchConfig(tasks=(TaskConfig(limit=3, modes=("off", "lr"), concurrency=2),))


def bench(config: BenchConfig, out: Path, **options: Any) -> Bench:
    return Bench(config, out, options.pop("make_model", scripted_configuration), **options)


def test_every_sample_is_measured_once_and_records_its_settings(tmp_path: Path) -> None:
    config = BenchConfig(
        seed=5, tasks=(TaskConfig(limit=2, modes=MODES), TaskConfig(task="self_consistency", limit=1, modes=MODES))
    )
    results = bench(config, tmp_path / "r.jsonl").run()
    assert {sample.configuration for sample in results if sample.task == "questions"} == {
        "off",
        "auto",
        "sd",
        "shared_draft",
        "lr",
        "lr+sd",
        "lr+shared_draft",
        "specreason",
        "random",
    }
    assert set(Counter(sample.key for sample in results).values()) == {1}
    sample = next(sample for sample in results if sample.configuration == "lr" and sample.problem == "own-0")
    assert sample.correct is True
    assert sample.seed == 5
    assert sample.settings["max_tokens"] == 512
    assert sample.environment["packages"]["langgraph"]
    (call,) = sample.calls
    assert call.policy == "balanced"
    assert call.steps == 3
    assert call.accepted == 3
    assert call.output_tokens > 0
    assert call.first_token is not None
    assert 0 < call.first_token <= call.seconds
    assert len(call.verdicts) == 3
    voting = [sample for sample in results if sample.task == "self_consistency" and sample.configuration == "lr"]
    assert {call.node for call in voting[0].calls} == {"sampler"}
    assert {call.policy for call in voting[0].calls} == {"balanced"}


def test_replies_have_a_seed_only_if_the_config_has_one(tmp_path: Path) -> None:
    """With a seed, a shared draft proposes nothing for a sampled reply, so a default seed would distort results."""
    seeds: list[int | None] = []

    def solve(task: TaskConfig, llm: ChatLookahead, question: str, seed: int | None, config: Any, **_: Any) -> str:
        seeds.append(seed)
        return "1"

    for seed in (None, 5):
        task = TaskConfig(limit=1, modes=("off",), samples=2)
        config = BenchConfig(seed=seed, temperature=0.7, tasks=(task,))
        results = bench(config, tmp_path / f"{seed}.jsonl", solve_problem=solve).run()
        assert sorted(sample.sample for sample in results) == [0, 1]
        assert {sample.seed for sample in results} == ({None} if seed is None else {5, 6})
    assert seeds == [None, None, 5, 6]


def test_modes_alternate_and_take_turns_to_begin(tmp_path: Path) -> None:
    order: list[tuple[str, str]] = []
    bench(OFF_AND_LR, tmp_path / "r.jsonl").run(
        on_sample=lambda sample: order.append((sample.configuration, sample.problem))
    )
    assert [configuration for configuration, _ in order] == ["off", "off", "lr", "lr", "lr", "off"]


def test_three_configurations_run_in_every_order_equally_often(tmp_path: Path) -> None:
    task = TaskConfig(limit=6, variants=("off int8",))
    sequence: list[str] = []
    bench(BenchConfig(tasks=(task,)), tmp_path / "r.jsonl").run(
        on_sample=lambda sample: sequence.append(sample.configuration)
    )
    orders = Counter(tuple(sequence[start : start + 3]) for start in range(0, len(sequence), 3))
    assert orders == Counter(itertools.permutations(("off", "off int8", "auto")))


@pytest.mark.parametrize("after", range(1, 6))
def test_interruption_after_any_sample_loses_and_repeats_nothing(tmp_path: Path, after: int) -> None:
    out = tmp_path / "r.jsonl"
    first: list[Sample] = []

    def interrupt(sample: Sample) -> None:
        first.append(sample)
        if len(first) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(OFF_AND_LR, out).run(on_sample=interrupt)
    second: list[Sample] = []
    results = bench(OFF_AND_LR, out).run(on_sample=second.append)
    assert not {sample.key for sample in second} & {sample.key for sample in first}
    assert set(Counter(sample.key for sample in results).values()) == {1}
    assert len(results) == 6


def test_results_file_truncated_anywhere_is_completed(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    bench(OFF_AND_LR, out).run()
    complete = out.read_bytes()
    lines = complete.count(b"\n")
    for length in range(0, len(complete), max(1, len(complete) // 12)):
        out.write_bytes(complete[:length])
        results = bench(OFF_AND_LR, out).run()
        assert set(Counter(sample.key for sample in results).values()) == {1}
        assert len(results) == 6
        resumed = out.read_bytes()
        assert resumed.startswith(complete[: complete[:length].rfind(b"\n") + 1])
        assert all(json.loads(line) for line in resumed.splitlines())
        assert resumed.count(b"\n") >= lines - 1


SCRIPT = """
import sys
from pathlib import Path
from lookahead_agent.bench.config import BenchConfig, TaskConfig
from lookahead_agent.bench.runner import Bench
from tests.unit.bench_models import scripted_configuration

config = BenchConfig(tasks=(TaskConfig(limit=4, modes=("off", "lr"), concurrency=2),))
Bench(config, Path(sys.argv[1]), scripted_configuration).run(on_sample=lambda sample: print(*sample.key, flush=True))
"""


def test_run_after_sigkill_measures_only_the_missing_samples(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    printed: list[str] = []
    for stop_after in (1, 2, None):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for number, line in enumerate(process.stdout, 1):
                printed.append(line)
                if number == stop_after:
                    process.send_signal(signal.SIGKILL)
    keys = [
        tuple(row[name] for name in ("configuration", "problem"))
        for row in RowFile(out).rows
        if row["kind"] == "sample"
    ]
    assert len(keys) == len(set(keys)) == 8
    assert max(Counter(printed).values()) == 1


def test_finished_benchmark_calls_no_model(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    bench(OFF_AND_LR, out).run()

    def failing_model(config: BenchConfig, task: TaskConfig, configuration: TaskConfiguration) -> ChatLookahead:
        return scripted_chat(lambda prompt: pytest.fail("asked again"))

    results = bench(OFF_AND_LR, out, make_model=failing_model).run()
    assert len(results) == 6


def test_added_problems_and_modes_extend_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    bench(OFF_AND_LR, out).run()
    extended = OFF_AND_LR.model_copy(
        update={"tasks": (TaskConfig(limit=4, modes=("off", "lr", "random"), concurrency=2),)}
    )
    new: list[Sample] = []
    bench(extended, out).run(on_sample=new.append)
    assert sorted((sample.configuration, sample.problem) for sample in new) == [
        ("lr", "own-3"),
        ("off", "own-3"),
        *(("random", f"own-{number}") for number in range(4)),
    ]


def test_file_with_results_of_other_settings_is_rejected(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    bench(OFF_AND_LR, out).run()
    with pytest.raises(ConfigurationError, match="other settings"):
        bench(OFF_AND_LR.model_copy(update={"temperature": 0.5}), out)
    other = tmp_path / "own"
    other.write_text('{"id": "own-0", "question": "another one", "answer": 3}\n')
    with pytest.raises(ConfigurationError, match="other settings"):
        bench(BenchConfig(tasks=(TaskConfig(dataset=str(other), modes=("off", "lr"), concurrency=2),)), out)


def test_run_is_rejected_while_another_one_writes_to_its_file(tmp_path: Path) -> None:
    out = RowFile(tmp_path / "r.jsonl")
    with out.open_for_writing(), pytest.raises(ConfigurationError, match="another run"):
        bench(OFF_AND_LR, tmp_path / "r.jsonl").run()


def test_each_block_has_a_baseline_and_closes_the_models_that_the_next_does_not_need(tmp_path: Path) -> None:
    config = BenchConfig(
        blocks=(("lr",), ("sd",)), tasks=(TaskConfig(limit=1, modes=("off", "lr", "sd"), concurrency=1),)
    )
    events: list[str] = []

    class RecordingChat(ChatLookahead):
        def start(self, progress: Any = None) -> None:
            events.append(f"start {self.model}")

        def close(self) -> None:
            events.append(f"close {self.model}")

    def make(config: BenchConfig, task: TaskConfig, configuration: TaskConfiguration) -> ChatLookahead:
        default, _ = configuration.policies(template_policies(task))
        chat = scripted_chat("It is 14.", policy=default)
        return RecordingChat(engines=chat.engines, policy=default, model=configuration.name)

    results = bench(config, tmp_path / "r.jsonl", make_model=make).run(
        on_sample=lambda sample: events.append(f"{sample.block} {sample.configuration}")
    )
    assert [event for event in events if event[0].isdigit()] == ["0 off", "0 lr", "1 off", "1 sd"]
    assert events.index("close lr") < events.index("start sd")
    assert events.count("start off") == events.count("close off") == 1
    assert events[-1].startswith("close")
    assert len(results) == 4


def test_graph_failure_is_recorded_as_a_wrong_sample(tmp_path: Path) -> None:
    def solve(task: TaskConfig, llm: ChatLookahead, question: str, seed: int, config: Any, **_: Any) -> str:
        if "farmer" in question:
            raise RecursionError("the graph went in circles")
        return "It is 14."

    config = BenchConfig(tasks=(TaskConfig(limit=3, modes=("off",)),))
    results = bench(config, tmp_path / "r.jsonl", solve_problem=solve).run()
    assert [sample.error for sample in results] == [None, "RecursionError: the graph went in circles", None]
    assert [sample.correct for sample in results] == [True, False, False]


def test_engine_failure_ends_the_run_and_a_later_run_resumes(tmp_path: Path) -> None:
    def make(config: BenchConfig, task: TaskConfig, configuration: TaskConfiguration) -> ChatLookahead:
        def reply(prompt: str) -> str:
            if "farmer" in prompt:
                raise EngineError("it is gone")
            return "It is 14."

        return scripted_chat(reply, policy="off", streaming=True)

    config = BenchConfig(tasks=(TaskConfig(limit=3, modes=("off",)),))
    out = tmp_path / "r.jsonl"
    with pytest.raises(EngineError):
        bench(config, out, make_model=make).run()
    assert len(bench(config, out).results()) == 1
    assert len(bench(config, out).run()) == 3


def test_configurations_combine_modes_policies_and_depths() -> None:
    task = TaskConfig(modes=("lr", "sd"), policies=("balanced", "exact:width=2"), depths=(1, 4))
    configurations = configurations_of(task)
    assert [configuration.name for configuration in configurations] == [
        "off",
        "lr balanced depth=1",
        "lr balanced depth=4",
        "lr exact:width=2 depth=1",
        "lr exact:width=2 depth=4",
        "sd",
    ]
    with pytest.raises(PolicyError):
        configurations_of(TaskConfig(modes=("lr",), policies=("strictest",)))


def test_configuration_sets_the_policy_of_each_node() -> None:
    template = {"planner": "balanced", "caller": "off", "solver": "strict"}
    assert TaskConfiguration("off", "off").policies(template) == ("off", {})
    assert TaskConfiguration("lr", "nodes").policies(template) == ("balanced", template)
    assert TaskConfiguration("lr", "nodes", "depth=2").policies(template)[1] == {
        "planner": "balanced:depth=2",
        "caller": "off",
        "solver": "strict:depth=2",
    }
    assert TaskConfiguration("random", "random").policies(template)[1] == {
        "planner": "random",
        "caller": "off",
        "solver": "random",
    }
    assert TaskConfiguration("lr+sd", "exact").policies(template) == (
        "exact",
        {"planner": "exact", "caller": "off", "solver": "exact"},
    )


def test_mode_sets_the_fields_of_the_chat_model() -> None:
    config = BenchConfig(token_speculation="ngram", temperature=0.7, top_p=0.8, top_k=20)
    task = TaskConfig(max_tokens=77, modes=MODES)
    models = {configuration.mode: chat_model(config, task, configuration) for configuration in configurations_of(task)}
    assert {mode: llm.token_speculation for mode, llm in models.items()} == {
        "off": "none",
        "auto": "auto",
        "sd": "ngram",
        "shared_draft": "shared_draft",
        "lr": "none",
        "lr+sd": "ngram",
        "lr+shared_draft": "shared_draft",
        "specreason": "none",
        "random": "none",
    }
    assert str(models["specreason"].policy) == "specreason"
    assert all(llm.max_tokens == 77 for llm in models.values())
    assert {(llm.temperature, llm.top_p, llm.top_k) for llm in models.values()} == {(0.7, 0.8, 20)}
    forced = {mode for mode, llm in models.items() if llm.policy_for().forces_speculation}
    assert forced == {"lr", "lr+sd", "lr+shared_draft", "specreason", "random"}
    bf16 = BenchConfig(precision="bf16")
    precisions = {
        configuration.mode: chat_model(bf16, task, configuration).precision for configuration in configurations_of(task)
    }
    assert precisions.pop("auto") == "auto", "the automatic configuration chooses the precision"
    assert set(precisions.values()) == {"bf16"}
    with_variants = task.model_copy(update={"modes": ("off", "auto"), "variants": ("off int8", "off fp32")})
    configurations = configurations_of(with_variants)
    assert [configuration.name for configuration in configurations] == ["off", "off int8", "off fp32", "auto"]
    assert [chat_model(bf16, with_variants, configuration).precision for configuration in configurations] == [
        "bf16",
        "int8",
        "fp32",
        "auto",
    ]


def test_off_shares_its_runtime_with_lr_on_gpus_only() -> None:
    task = TaskConfig(modes=("off", "sd", "lr", "specreason"))

    def runtimes(config: BenchConfig, on_cpu: bool) -> dict[str, Any]:
        return {
            configuration.mode: chat_model(config, task, configuration, on_cpu=on_cpu).backend.runtime
            for configuration in configurations_of(task)
        }

    on_cpu = runtimes(BenchConfig(), True)
    assert on_cpu["lr"] is on_cpu["specreason"]
    assert on_cpu["off"] is not on_cpu["lr"], "the target alone has all cores"
    for config in (BenchConfig(), BenchConfig(model="Qwen/Qwen3-32B", draft_model="Qwen/Qwen3-1.7B")):
        on_gpu = runtimes(config, False)
        assert on_gpu["off"] is on_gpu["lr"]
        assert on_gpu["sd"] is not on_gpu["lr"]


def test_mode_off_overrides_the_node_policies_of_the_chat_model(tmp_path: Path) -> None:
    def make(config: BenchConfig, task: TaskConfig, configuration: TaskConfiguration) -> ChatLookahead:
        return scripted_chat("We think.\n\nAnswer: 14", policy="exact", policies={"sampler": "fast"}, streaming=True)

    config = BenchConfig(
        tasks=(
            TaskConfig(limit=1, modes=("off", "sd")),
            TaskConfig(task="self_consistency", limit=1, modes=("off", "lr")),
        )
    )
    results = bench(config, tmp_path / "r.jsonl", make_model=make).run()
    assert {(sample.task, sample.configuration): {call.policy for call in sample.calls} for sample in results} == {
        ("questions", "off"): {"off"},
        ("questions", "sd"): {"off"},
        ("self_consistency", "off"): {"off"},
        ("self_consistency", "lr"): {"fast"},
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0, "tasks": [{"samples": 2}]}, "same reply again"),
        ({"tasks": [{"modes": ["off"], "depths": [2]}]}, "depths are for the modes lr"),
        ({"tasks": [{}, {}]}, "two tasks have one name"),
        ({"tasks": [{"task": "sing"}]}, "tasks.0.task"),
        ({"speed": 3}, "speed"),
        ({"blocks": [["lr"], ["lr"]], "tasks": [{"modes": ["lr"]}]}, "each mode that is measured once"),
        ({"blocks": [["lr"]], "tasks": [{"modes": ["lr", "sd"]}]}, "each mode that is measured once"),
        ({"tasks": []}, "tasks"),
        ({"tasks": [{"variants": ["off"]}]}, "'off' is not a variant"),
        ({"tasks": [{"variants": ["int8"]}]}, "'int8' is not a variant"),
        ({"tasks": [{"variants": ["auto int8"]}]}, "'auto int8' is not a variant"),
    ],
)
def test_invalid_benchmarks_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_config(fields)


@pytest.mark.parametrize("name", packaged_configs())
def test_packaged_configs_state_a_purpose_and_measure_speculation(name: str) -> None:
    config = load_config(name)
    assert packaged_configs()[name].read_text(encoding="utf-8").startswith("# "), "the first comment states the purpose"
    for task in config.tasks:
        assert {configuration.mode for configuration in configurations_of(task)} & {"auto", "lr"}


def test_unreadable_configs_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give a TOML file, or one of cpu"):
        load_config("nowhere")
    file = tmp_path / "b.toml"
    file.write_text("tasks = [")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_config(str(file))
