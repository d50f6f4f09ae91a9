"""Environments of vLLM's processes: which settings of OpenMP they begin with, and whether the worker is forked."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.cpu import binding, bound_cores
from lookahead_agent.engines.vllm_config import (
    VLLMConfig,
    as_arguments,
    process_environment,
    runs_on_cpu,
    worker_environment,
)

OPENMP = {"OMP_NUM_THREADS": "3", "GOMP_CPU_AFFINITY": "0 1 4"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, "max_position_embeddings": 512}))
    return tmp_path


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_binding_is_read_as_it_was_written(cores: set[int]) -> None:
    assert bound_cores(binding(sorted(cores))) == sorted(cores)


@pytest.mark.parametrize("notation", ["", "auto", "nobind", "0-3|4-7", "0,", "a-b", "-1"])
def test_other_notations_bind_no_known_cores(notation: str) -> None:
    assert bound_cores(notation) == []


@pytest.mark.skipif(not runs_on_cpu(), reason="vLLM for GPUs starts its workers itself")
def test_processes_begin_with_the_openmp_settings_of_a_single_eager_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LD_PRELOAD", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)

    def settings(cores: str | None = "0-1,4", **arguments: Any) -> dict[str, str]:
        return worker_environment(VLLMConfig(model, cores, as_arguments(arguments)))

    assert settings() == {**OPENMP, "LD_PRELOAD": settings()["LD_PRELOAD"]}
    assert Path(settings()["LD_PRELOAD"]).is_file()
    assert process_environment(VLLMConfig(model, "0-1,4")).items() >= settings().items()
    assert settings(None) == settings("auto") == settings("0|1") == {}
    assert settings(tensor_parallel_size=2) == settings(pipeline_parallel_size=2) == settings(enforce_eager=False) == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert settings() == {}, "the user's own setting stays"
    assert "OMP_NUM_THREADS" not in process_environment(VLLMConfig(model, "0"))
    assert os.environ["OMP_NUM_THREADS"] == "1"
