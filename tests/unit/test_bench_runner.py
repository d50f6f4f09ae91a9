"""Benchmarks are run in turns, recorded whole, and resumed after any interruption."""

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
    Configuration,
    TaskConfig,
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
from lookahead_agent.jsonl import RowFile
from tests.unit.bench_models import scripted_configuration
from tests.unit.chat import scripted_chat

TWO = BenchConfig(tasks=(TaskConfig(limit=3, modes=("off", "lr"), concurrency=2),))


def bench(config: BenchConfig, out: Path, **options: Any) -> Bench:
    return Bench(config, out, options.pop("make_model", scripted_configuration), **options)


def test_every_sample_is_measured_once_with_all_that_it_takes_to_repeat_it(tmp_path: Path) -> None:
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
    voted = [sample for sample in results if sample.task == "self_consistency" and sample.configuration == "lr"]
    assert {call.node for call in voted[0].calls} == {"sampler"}
    assert {call.policy for call in voted[0].calls} == {"balanced"}


def test_replies_have_a_seed_only_where_one_is_given(tmp_path: Path) -> None:
    """A shared draft proposes nothing for a sampled reply with a seed, so that one would measure something else."""
    seeds: list[int | None] = []

    def solve(task: TaskConfig, llm: ChatLookahead, question: str, seed: int | None, config: Any, **_: Any) -> str:
        seeds.append(seed)
        return "1"

    for seed in (None, 5):
        task = TaskConfig(limit=1, modes=("off",), samples=2)
        config = BenchConfig(seed=seed, temperature=0.7, tasks=(task,))
        done = bench(config, tmp_path / f"{seed}.jsonl", solve_problem=solve).run()
        assert sorted(sample.sample for sample in done) == [0, 1]
        assert {sample.seed for sample in done} == ({None} if seed is None else {5, 6})
    assert seeds == [None, None, 5, 6]


def test_the_modes_take_turns_and_another_begins_each_time(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    bench(TWO, tmp_path / "r.jsonl").run(on_sample=lambda sample: asked.append((sample.configuration, sample.problem)))
    assert [configuration for configuration, _ in asked] == ["off", "off", "lr", "lr", "lr", "off"]


def test_of_three_configurations_each_comes_as_often_before_another_as_after_it(tmp_path: Path) -> None:
    task = TaskConfig(limit=6, variants=("off int8",))
    asked: list[str] = []
    bench(BenchConfig(tasks=(task,)), tmp_path / "r.jsonl").run(
        on_sample=lambda sample: asked.append(sample.configuration)
    )
    orders = Counter(tuple(asked[at : at + 3]) for at in range(0, len(asked), 3))
    assert orders == Counter(itertools.permutations(("off", "off int8", "auto")))


@pytest.mark.parametrize("after", range(1, 6))
def test_interrupted_after_any_sample_nothing_is_lost_or_repeated(tmp_path: Path, after: int) -> None:
    out = tmp_path / "r.jsonl"
    asked: list[Sample] = []

    def interrupt(sample: Sample) -> None:
        asked.append(sample)
        if len(asked) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(TWO, out).run(on_sample=interrupt)
    again: list[Sample] = []
    results = bench(TWO, out).run(on_sample=again.append)
    assert not {sample.key for sample in again} & {sample.key for sample in asked}
    assert set(Counter(sample.key for sample in results).values()) == {1}
    assert len(results) == 6


def test_a_file_cut_anywhere_is_completed(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    bench(TWO, out).run()
    whole = out.read_bytes()
    lines = whole.count(b"\n")
    for cut in range(0, len(whole), max(1, len(whole) // 12)):
        out.write_bytes(whole[:cut])
        results = bench(TWO, out).run()
        assert set(Counter(sample.key for sample in results).values()) == {1}
        assert len(results) == 6
        kept = out.read_bytes()
        assert kept.startswith(whole[: whole[:cut].rfind(b"\n") + 1])
        assert all(json.loads(line) for line in kept.splitlines())
        assert kept.count(b"\n") >= lines - 1


SCRIPT = """
import sys
from pathlib import Path
from lookahead_agent.bench.config import BenchConfig, TaskConfig
from lookahead_agent.bench.runner import Bench
from tests.unit.bench_models import scripted_configuration

config = BenchConfig(tasks=(TaskConfig(limit=4, modes=("off", "lr"), concurrency=2),))
Bench(config, Path(sys.argv[1]), scripted_configuration).run(on_sample=lambda sample: print(*sample.key, flush=True))
"""


def test_a_killed_process_is_continued_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    said: list[str] = []
    for stop_after in (1, 2, None):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for number, line in enumerate(process.stdout, 1):
                said.append(line)
                if number == stop_after:
                    process.send_signal(signal.SIGKILL)
    keys = [
        tuple(row[name] for name in ("configuration", "problem"))
        for row in RowFile(out).rows
        if row["kind"] == "sample"
    ]
    assert len(keys) == len(set(keys)) == 8
    assert max(Counter(said).values()) == 1


def test_a_finished_benchmark_starts_nothing(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    bench(TWO, out).run()

    def untouchable(config: BenchConfig, task: TaskConfig, configuration: Configuration) -> ChatLookahead:
        return scripted_chat(lambda prompt: pytest.fail("asked again"))

    results = bench(TWO, out, make_model=untouchable).run()
    assert len(results) == 6


def test_more_problems_and_modes_go_on_in_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    bench(TWO, out).run()
    more = TWO.model_copy(update={"tasks": (TaskConfig(limit=4, modes=("off", "lr", "random"), concurrency=2),)})
    new: list[Sample] = []
    bench(more, out).run(on_sample=new.append)
    assert sorted((sample.configuration, sample.problem) for sample in new) == [
        ("lr", "own-3"),
        ("off", "own-3"),
        *(("random", f"own-{number}") for number in range(4)),
    ]


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    bench(TWO, out).run()
    with pytest.raises(ConfigurationError, match="other settings"):
        bench(TWO.model_copy(update={"temperature": 0.5}), out)
    other = tmp_path / "own"
    other.write_text('{"id": "own-0", "question": "another one", "answer": 3}\n')
    with pytest.raises(ConfigurationError, match="other settings"):
        bench(BenchConfig(tasks=(TaskConfig(dataset=str(other), modes=("off", "lr"), concurrency=2),)), out)


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    out = RowFile(tmp_path / "r.jsonl")
    with out.writing(), pytest.raises(ConfigurationError, match="another run"):
        bench(TWO, tmp_path / "r.jsonl").run()


def test_blocks_have_a_baseline_each_and_close_what_the_next_does_not_need(tmp_path: Path) -> None:
    config = BenchConfig(
        blocks=(("lr",), ("sd",)), tasks=(TaskConfig(limit=1, modes=("off", "lr", "sd"), concurrency=1),)
    )
    events: list[str] = []

    class Watched(ChatLookahead):
        def start(self, progress: Any = None) -> None:
            events.append(f"start {self.model}")

        def close(self) -> None:
            events.append(f"close {self.model}")

    def make(config: BenchConfig, task: TaskConfig, configuration: Configuration) -> ChatLookahead:
        default, _ = configuration.policies(template_policies(task))
        chat = scripted_chat("It is 14.", policy=default)
        return Watched(engines=chat.engines, policy=default, model=configuration.name)

    results = bench(config, tmp_path / "r.jsonl", make_model=make).run(
        on_sample=lambda sample: events.append(f"{sample.block} {sample.configuration}")
    )
    assert [event for event in events if event[0].isdigit()] == ["0 off", "0 lr", "1 off", "1 sd"]
    assert events.index("close lr") < events.index("start sd")
    assert events.count("start off") == events.count("close off") == 1
    assert events[-1].startswith("close")
    assert len(results) == 4


def test_a_graph_that_fails_is_a_result(tmp_path: Path) -> None:
    def solve(task: TaskConfig, llm: ChatLookahead, question: str, seed: int, config: Any, **_: Any) -> str:
        if "farmer" in question:
            raise RecursionError("the graph went in circles")
        return "It is 14."

    config = BenchConfig(tasks=(TaskConfig(limit=3, modes=("off",)),))
    results = bench(config, tmp_path / "r.jsonl", solve_problem=solve).run()
    assert [sample.error for sample in results] == [None, "RecursionError: the graph went in circles", None]
    assert [sample.correct for sample in results] == [True, False, False]


def test_an_engine_that_fails_ends_the_run_which_goes_on_later(tmp_path: Path) -> None:
    def make(config: BenchConfig, task: TaskConfig, configuration: Configuration) -> ChatLookahead:
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


def test_configurations_of_a_task() -> None:
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


def test_each_node_gets_its_policy_in_each_mode() -> None:
    own = {"planner": "balanced", "caller": "off", "solver": "strict"}
    assert Configuration("off", "off").policies(own) == ("off", {})
    assert Configuration("lr", "nodes").policies(own) == ("balanced", own)
    assert Configuration("lr", "nodes", "depth=2").policies(own)[1] == {
        "planner": "balanced:depth=2",
        "caller": "off",
        "solver": "strict:depth=2",
    }
    assert Configuration("random", "random").policies(own)[1] == {
        "planner": "random",
        "caller": "off",
        "solver": "random",
    }
    assert Configuration("lr+sd", "exact").policies(own) == (
        "exact",
        {"planner": "exact", "caller": "off", "solver": "exact"},
    )


def test_what_a_mode_makes_of_the_chat_model() -> None:
    config = BenchConfig(token_speculation="ngram", temperature=0.7, top_p=0.8, top_k=20)
    task = TaskConfig(max_tokens=77, modes=MODES)
    fields = {configuration.mode: chat_model(config, task, configuration) for configuration in configurations_of(task)}
    assert {mode: llm.token_speculation for mode, llm in fields.items()} == {
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
    assert str(fields["specreason"].policy) == "specreason"
    assert all(llm.max_tokens == 77 for llm in fields.values())
    assert {(llm.temperature, llm.top_p, llm.top_k) for llm in fields.values()} == {(0.7, 0.8, 20)}
    forced = {mode for mode, llm in fields.items() if llm.policy_for().forces_speculation}
    assert forced == {"lr", "lr+sd", "lr+shared_draft", "specreason", "random"}
    fixed = BenchConfig(precision="bf16")
    precisions = {
        configuration.mode: chat_model(fixed, task, configuration).precision
        for configuration in configurations_of(task)
    }
    assert precisions.pop("auto") == "auto", "it chooses for itself"
    assert set(precisions.values()) == {"bf16"}
    with_variants = task.model_copy(update={"modes": ("off", "auto"), "variants": ("off int8", "off fp32")})
    configurations = configurations_of(with_variants)
    assert [configuration.name for configuration in configurations] == ["off", "off int8", "off fp32", "auto"]
    assert [chat_model(fixed, with_variants, configuration).precision for configuration in configurations] == [
        "bf16",
        "int8",
        "fp32",
        "auto",
    ]


def test_on_a_gpu_the_target_alone_is_the_pairs_own_engine() -> None:
    task = TaskConfig(modes=("off", "sd", "lr", "specreason"))

    def runtimes(config: BenchConfig, on_cpu: bool) -> dict[str, Any]:
        return {
            configuration.mode: chat_model(config, task, configuration, on_cpu=on_cpu).backend.runtime
            for configuration in configurations_of(task)
        }

    on_cpu = runtimes(BenchConfig(), True)
    assert on_cpu["lr"] is on_cpu["specreason"]
    assert on_cpu["off"] is not on_cpu["lr"], "it has all cores"
    for config in (BenchConfig(), BenchConfig(model="Qwen/Qwen3-32B", draft_model="Qwen/Qwen3-1.7B")):
        on_gpu = runtimes(config, False)
        assert on_gpu["off"] is on_gpu["lr"]
        assert on_gpu["sd"] is not on_gpu["lr"]


def test_off_is_off_in_every_node_whatever_the_chat_model_has(tmp_path: Path) -> None:
    def make(config: BenchConfig, task: TaskConfig, configuration: Configuration) -> ChatLookahead:
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
        ({"tasks": [{"variants": ["off"]}]}, "'off' is no variant"),
        ({"tasks": [{"variants": ["int8"]}]}, "'int8' is no variant"),
        ({"tasks": [{"variants": ["auto int8"]}]}, "'auto int8' is no variant"),
    ],
)
def test_benchmarks_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_config(fields)


@pytest.mark.parametrize("name", packaged_configs())
def test_the_packaged_configurations_are_whole(name: str) -> None:
    config = load_config(name)
    assert packaged_configs()[name].read_text(encoding="utf-8").startswith("# "), "its purpose"
    for task in config.tasks:
        assert {configuration.mode for configuration in configurations_of(task)} & {"auto", "lr"}


def test_configurations_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give a TOML file, or one of cpu"):
        load_config("nowhere")
    file = tmp_path / "b.toml"
    file.write_text("tasks = [")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_config(str(file))
