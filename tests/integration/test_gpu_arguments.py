"""Engine arguments of the GPU path, held against vLLM's configuration classes: no device is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ALONE = {"policy": "off", "token_speculation": "none"}
CHAT_MODELS: dict[str, dict[str, Any]] = {
    "steps": {"depth": 4},
    "shared_draft": {"depth": 4, "token_speculation": "shared_draft"},
    "default": {},
    "draft_model": {"policy": "off", "token_speculation": "draft_model", "precision": "bf16"},
    "ngram": {"policy": "off", "token_speculation": "ngram"},
    "alone": ALONE,
    "tensor parallel": {"depth": 4, "engine_args": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}},
    "nodes": ALONE
    | {
        "engine_args": {
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "ray",
        }
    },
    "replicas": ALONE | {"engine_args": {"data_parallel_size": 2, "distributed_executor_backend": "mp"}},
    "offloading": ALONE | {"engine_args": {"kv_offloading_size": 32}},
    "prefixes": ALONE | {"engine_args": {"kv_cache_memory_bytes": 5 << 29, "kv_cache_dtype": "fp8"}},
    "given": ALONE | {"engine_args": {"gpu_memory_utilization": 0.5, "dtype": "float16"}},
}

Configured = dict[str, list[dict[str, Any]]]
"""What vLLM is configured as for each chat model, the target first."""


@pytest.fixture(scope="module")
def configured(tiny_pair: tuple[Path, Path]) -> Configured:
    models = {"model": str(tiny_pair[0]), "draft_model": str(tiny_pair[1]), "use_daemon": False}
    asked = json.dumps([models | fields for fields in CHAT_MODELS.values()])
    command = [sys.executable, "-m", "tests.integration.cuda_platform", asked]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[dict[str, Any]]] = json.loads(done.stdout.strip().splitlines()[-1])
    for config in (config for configs in found for config in configs):
        assert config["device"] == "cuda"
        assert config["prefix_caching"]
        assert not config["eager"], "CUDA graphs are vLLM's own choice"
    ordered = [sorted(configs, key=lambda config: config["model"] != str(tiny_pair[0])) for configs in found]
    return dict(zip(CHAT_MODELS, ordered, strict=True))


def test_a_pair_shares_the_gpu(configured: Configured) -> None:
    for name in "default", "steps", "shared_draft":
        target, draft = configured[name][0], configured[name][-1]
        assert target["model"] != draft["model"]
        assert (target["method"], draft["method"]) == ("custom_class", None)
        assert target["draft_tokens"] > 0
        assert target["share"] + draft["share"] == pytest.approx(0.92, abs=0.001)
        assert min(target["share"], draft["share"]) > 0.02, "room for its weights, and more"


def test_a_target_that_does_not_start_with_a_shared_draft_starts_without(configured: Configured) -> None:
    assert [engine["method"] for engine in configured["shared_draft"]] == ["custom_class", None, None, None]


def test_a_target_beside_a_draft_leaves_it_multiprocessors(configured: Configured) -> None:
    assert configured["default"][0]["multiprocessors"] == "80"
    assert configured["default"][-1]["multiprocessors"] is None
    assert [engine["multiprocessors"] for engine in configured["alone"]] == [None]


def test_a_draft_model_inside_vllm_has_the_runner_with_cuda_graphs(configured: Configured) -> None:
    runners = {name: configured[name][0]["runner"] for name in ("draft_model", "ngram", "alone", "default")}
    assert runners == {"draft_model": "0", "ngram": None, "alone": None, "default": None}


def test_parallel_engines_are_vllms(configured: Configured) -> None:
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "executor")
    found = {name: [tuple(engine[each] for each in names) for engine in configured[name]] for name in CHAT_MODELS}
    assert found["tensor parallel"] == [(2, 1, 1, "mp"), (1, 1, 1, "uni")]
    assert found["nodes"] == [(4, 2, 1, "ray")]
    assert found["replicas"] == [(1, 1, 2, "mp")]


def test_methods_of_token_speculation(configured: Configured) -> None:
    for name, method in {"draft_model": "draft_model", "ngram": "ngram", "alone": None}.items():
        (target,) = configured[name]
        assert target["method"] == method
        assert target["share"] > 0.8, "there is no second engine"
    assert configured["draft_model"][0]["dtype"] == "torch.bfloat16"


def test_what_a_user_gives_goes_before(configured: Configured) -> None:
    (target,) = configured["given"]
    assert (target["share"], target["dtype"]) == (0.5, "torch.float16")


def test_prefixes_are_kept_as_the_page_says(configured: Configured) -> None:
    assert configured["offloading"][0]["offloading"] == ["OffloadingConnector", 32 << 30]
    assert configured["prefixes"][0]["cache"] == ["fp8", 5 << 29]
    assert configured["alone"][0]["offloading"] is None
