"""Engine arguments of the GPU path, checked by vLLM's configuration classes without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import Glm4MoeConfig

ROOT = Path(__file__).parents[2]
ALONE = {"policy": "off", "token_speculation": "none"}
TOGETHER = {"target": "0", "draft": "0"}
CHAT_MODELS: dict[str, dict[str, Any]] = {
    "steps": {"depth": 4, "gpus": TOGETHER},
    "shared_draft": {"depth": 4, "token_speculation": "shared_draft", "gpus": TOGETHER},
    "own GPUs": {"depth": 4},
    "default": {},
    "off": {"policy": "off", "engine_args": {"max_num_seqs": 8}},  # else the runtime of "default" serves it
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

HEADS = ("eagle3", "dflash")

Configurations = dict[str, list[dict[str, Any]]]
"""vLLM's engine configurations for each chat model, the target first."""


@pytest.fixture(scope="module")
def configurations(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Configurations:
    models = {"model": str(tiny_pair[0]), "draft_model": str(tiny_pair[1]), "use_daemon": False}
    heads = {kind: make_head(tmp_path_factory.mktemp("heads") / kind, kind, tiny_pair[0]) for kind in HEADS}
    heads["mtp"] = make_target_with_mtp(tmp_path_factory.mktemp("mtp") / "target", tiny_pair[0])
    chat_models = CHAT_MODELS | {kind: {"model": str(head), "policy": "off"} for kind, head in heads.items()}
    fields_json = json.dumps([models | fields for fields in chat_models.values()])
    command = [sys.executable, "-m", "tests.integration.cuda_platform", fields_json]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    found: list[list[dict[str, Any]]] = json.loads(process.stdout.strip().splitlines()[-1])
    for config in (config for configs in found for config in configs):
        assert config["device"] == "cuda"
        assert config["prefix_caching"]
        assert not config["eager"], "CUDA graphs are left to vLLM"
    ordered = [sorted(configs, key=lambda config: config["model"] != str(tiny_pair[0])) for configs in found]
    return dict(zip(chat_models, ordered, strict=True))


def make_head(folder: Path, kind: str, target: Path) -> Path:
    """Write the configuration of a head in the format of `speculators` for a target."""
    shape = json.loads((target / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    layer = {name: shape[name] for name in (*names, "max_position_embeddings", "rms_norm_eps")}
    layer |= {"model_type": "qwen3", "num_hidden_layers": 1, "head_dim": 32}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    config = {
        "architectures": ["Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": str(target)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape["vocab_size"],
        "aux_hidden_state_layer_ids": [0, 1],
        "mask_token_id": 0,
        "block_size": 4,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": np.zeros((1, 1), np.float32)}, folder / "model.safetensors")
    return folder


def make_target_with_mtp(folder: Path, tokenizer: Path) -> Path:
    """Write a target with a layer of its own for draft tokens, after its two layers."""
    shutil.copytree(tokenizer, folder)
    shape = {"vocab_size": json.loads((folder / "config.json").read_text())["vocab_size"], "hidden_size": 128}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    names = {"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1, "max_position_embeddings": 2048}
    Glm4MoeConfig(**shape, **experts, **names).save_pretrained(folder)
    save_file({"model.layers.2.eh_proj.weight": np.zeros((1, 1), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("kind", "tokens"), [("eagle3", 3), ("dflash", 3), ("mtp", 1)])
def test_target_brings_its_head(configurations: Configurations, kind: str, tokens: int) -> None:
    first, *_, last = configurations[kind]
    assert (first["method"], first["draft_tokens"], first["counts"]) == (kind, tokens, "summary")
    assert (last["method"], last["counts"]) == (None, "none"), "it starts without the head if it does not start with it"


def test_target_and_draft_split_the_gpu_memory(configurations: Configurations) -> None:
    for name in "steps", "shared_draft":
        target, draft = configurations[name][0], configurations[name][-1]
        assert target["model"] != draft["model"]
        assert (target["method"], draft["method"]) == ("custom_class", None)
        assert target["draft_tokens"] > 0
        assert target["share"] + draft["share"] == pytest.approx(0.92, abs=0.001)
        assert min(target["share"], draft["share"]) > 0.02, "each share holds more than the weights"


def test_each_engine_has_devices_of_its_own(configurations: Configurations) -> None:
    devices = {name: [engine["devices"] for engine in configurations[name]] for name in CHAT_MODELS}
    assert (devices["own GPUs"][0], devices["own GPUs"][-1]) == (None, "1"), "the first GPU needs no variable"
    assert set(devices["steps"]) == {"0"}
    assert (devices["tensor parallel"][0], devices["tensor parallel"][-1]) == (None, "2")
    assert [engine["share"] > 0.8 for engine in configurations["own GPUs"]] == [True] * len(devices["own GPUs"])
    assert configurations["own GPUs"][0]["multiprocessors"] is None, "the target shares its GPU with nobody"


def test_draft_takes_a_gpu_of_its_own_where_nothing_is_set(configurations: Configurations) -> None:
    target, draft = configurations["default"]
    assert (target["method"], target["devices"], target["multiprocessors"]) == (None, None, None)
    assert draft["devices"] == "1"


def test_cache_sizes_are_those_of_vllm(configurations: Configurations) -> None:
    for name in CHAT_MODELS:
        for engine in configurations[name]:
            assert engine["cache bytes"][0] == engine["cache bytes"][1] > 0, name


def test_target_that_fails_with_a_shared_draft_is_started_without_one(configurations: Configurations) -> None:
    assert [engine["method"] for engine in configurations["shared_draft"]] == ["custom_class", None, None, None]


def test_target_leaves_multiprocessors_to_its_draft(configurations: Configurations) -> None:
    assert configurations["steps"][0]["multiprocessors"] == "80"
    assert configurations["steps"][-1]["multiprocessors"] is None
    assert [engine["multiprocessors"] for engine in configurations["off"]] == [None]


def test_draft_model_method_selects_the_model_runner_with_cuda_graphs(configurations: Configurations) -> None:
    runners = {name: configurations[name][0]["runner"] for name in ("draft_model", "ngram", "alone", "steps")}
    assert runners == {"draft_model": "0", "ngram": None, "alone": None, "steps": None}


def test_parallelism_arguments_reach_vllm(configurations: Configurations) -> None:
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "executor")
    found = {name: [tuple(engine[each] for each in names) for engine in configurations[name]] for name in CHAT_MODELS}
    assert found["tensor parallel"] == [(2, 1, 1, "mp"), (1, 1, 1, "uni")]
    assert found["nodes"] == [(4, 2, 1, "ray")]
    assert found["replicas"] == [(1, 1, 2, "mp")]


def test_each_token_speculation_method_configures_one_engine(configurations: Configurations) -> None:
    for name, method in {"draft_model": "draft_model", "ngram": "ngram", "alone": None, "off": None}.items():
        (target,) = configurations[name]
        assert target["method"] == method
        assert target["share"] > 0.8, "no second engine needs memory"
    assert configurations["draft_model"][0]["dtype"] == "torch.bfloat16"


def test_user_arguments_override_the_defaults(configurations: Configurations) -> None:
    (target,) = configurations["given"]
    assert (target["share"], target["dtype"]) == (0.5, "torch.float16")


def test_kv_cache_arguments_of_the_documentation_reach_vllm(configurations: Configurations) -> None:
    assert configurations["offloading"][0]["offloading"] == ["OffloadingConnector", 32 << 30]
    assert configurations["prefixes"][0]["cache"] == ["fp8", 5 << 29]
    assert configurations["alone"][0]["offloading"] is None
