"""Environments of vLLM's processes: which settings of OpenMP they begin with, and whether the worker is forked."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.cpu import format_cores, parse_cores
from lookahead_agent.engines import replay_plugin
from lookahead_agent.engines.vllm_config import (
    VLLMConfig,
    as_arguments,
    engine_environment,
    process_environment,
    runs_on_cpu,
    worker_cores,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, "max_position_embeddings": 512}))
    return tmp_path


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_binding_is_read_as_it_was_written(cores: set[int]) -> None:
    assert parse_cores(format_cores(sorted(cores))) == sorted(cores)


@pytest.mark.parametrize("notation", ["", "auto", "nobind", "0-3|4-7", "0,", "a-b", "-1"])
def test_other_notations_bind_no_known_cores(notation: str) -> None:
    assert parse_cores(notation) == []


@pytest.mark.skipif(not runs_on_cpu(), reason="vLLM for GPUs starts its workers itself")
def test_a_single_eager_worker_is_the_engine_core_with_a_thread_for_each_core(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LD_PRELOAD", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)

    def configured(cores: str | None = "0-1,4", **arguments: Any) -> VLLMConfig:
        return VLLMConfig(model, cores, as_arguments(arguments))

    def environment(config: VLLMConfig) -> dict[str, str]:
        return process_environment(config, worker_cores(config))

    assert worker_cores(configured()) == [0, 1, 4]
    assert Path(environment(configured())["LD_PRELOAD"]).is_file()
    assert engine_environment(configured())["VLLM_CPU_OMP_THREADS_BIND"] == "0-1,4"
    assert environment(configured()) == environment(configured("5")), "they have the same starter"
    assert not any(map(worker_cores, map(configured, (None, "auto", "0|1"))))
    others: list[dict[str, Any]] = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
    for arguments in (*others, {"enforce_eager": False}, {"distributed_executor_backend": "mp"}):
        assert worker_cores(configured(**arguments)) == []
        assert "LD_PRELOAD" not in environment(configured(**arguments))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert worker_cores(configured()) == [], "the user's own setting stays"
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("architectures", "replays"), [(["ReplayQwen2ForCausalLM"], True), (["Qwen2ForCausalLM"], False), (None, False)]
)
def test_only_processes_of_a_replay_model_register_it(
    model: Path, architectures: list[str] | None, replays: bool
) -> None:
    config = json.loads((model / "config.json").read_text()) | {"architectures": architectures}
    (model / "config.json").write_text(json.dumps(config))
    assert (replay_plugin.VARIABLE in process_environment(VLLMConfig(model), [])) == replays
