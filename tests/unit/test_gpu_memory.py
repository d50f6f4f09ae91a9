"""How engines divide a GPU's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.runtime.weights import context_that_fits, kv_cache_bytes_per_token, memory_shares, weight_bytes

GIB = 2**30
H100 = 85_014_020_096
QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "torch_dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}
DUMMY = {"load_format": "dummy"}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    for name, shape in SHAPES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN3 | shape))
    return {name: tmp_path / name for name in SHAPES}


def test_weight_and_cache_sizes_match_those_that_vllm_reported(folders: dict[str, Path]) -> None:
    # vLLM on an H100: "Model loading took 15.27 GiB", "GPU KV cache size: 76,352 tokens" in 10.49 GiB.
    assert weight_bytes(folders["8b"], DUMMY) / GIB == pytest.approx(15.27, rel=0.01)
    assert kv_cache_bytes_per_token(folders["8b"], {}) == pytest.approx(10.49 * GIB / 76_352, rel=0.001)
    assert weight_bytes(folders["32b"], DUMMY) / 1e9 == pytest.approx(65.5, rel=0.01)
    assert weight_bytes(folders["1.7b"], DUMMY) / 1e9 == pytest.approx(3.44, rel=0.01), "tied embeddings count once"


def test_weight_bytes_are_file_sizes_divided_by_tensor_parallel_size(folders: dict[str, Path]) -> None:
    for number in (1, 2):
        (folders["8b"] / f"model-{number}.safetensors").write_bytes(b"x" * 1000)
    assert weight_bytes(folders["8b"], {}) == 2000, "independent of the precision"
    assert weight_bytes(folders["8b"], {"tensor_parallel_size": 2}) == 1000
    assert weight_bytes(folders["8b"], DUMMY) > GIB


def test_cache_size_depends_on_its_dtype_and_the_draft_model(folders: dict[str, Path]) -> None:
    target_bytes, draft_bytes = (kv_cache_bytes_per_token(folders[name], {}) for name in ("8b", "1.7b"))
    assert kv_cache_bytes_per_token(folders["8b"], {"kv_cache_dtype": "fp8"}) == target_bytes // 2
    assert kv_cache_bytes_per_token(folders["8b"], {"dtype": "float32"}) == 2 * target_bytes
    speculative = {"speculative_config": {"method": "draft_model", "model": str(folders["1.7b"])}}
    assert kv_cache_bytes_per_token(folders["8b"], speculative) == target_bytes + draft_bytes
    assert weight_bytes(folders["8b"], speculative) == weight_bytes(folders["8b"], {}) + weight_bytes(
        folders["1.7b"], {}
    )


def test_memory_shares_let_engines_cache_the_same_number_of_tokens(folders: dict[str, Path]) -> None:
    engines = {"target": (folders["32b"], DUMMY), "draft": (folders["1.7b"], DUMMY)}
    shares = memory_shares(engines, H100)
    assert sum(shares.values()) == pytest.approx(0.92, abs=0.001)
    tokens = {
        role: (shares[role] * H100 - weight_bytes(*engine) - 2.5 * GIB) / kv_cache_bytes_per_token(*engine)
        for role, engine in engines.items()
    }
    assert tokens["target"] == pytest.approx(tokens["draft"], rel=0.05)
    assert tokens["target"] > 10_000


def test_context_that_fits_depends_on_the_models_and_the_gpus_memory(folders: dict[str, Path]) -> None:
    pair = [(folders["8b"], DUMMY), (folders["1.7b"], DUMMY)]
    assert context_that_fits(pair, H100) > 100_000
    assert context_that_fits(pair[:1], 24 * GIB) == pytest.approx(31_000, rel=0.1)
    assert context_that_fits(pair, 24 * GIB) == 0, "not even the weights fit"


def test_requested_gpu_memory_utilization_is_kept(folders: dict[str, Path]) -> None:
    arguments = {"gpu_memory_utilization": 0.5}
    shares = memory_shares({"target": (folders["8b"], arguments), "draft": (folders["1.7b"], {})}, H100)
    assert shares["target"] == 0.5
    assert shares["draft"] == pytest.approx(0.42)
    assert memory_shares({"target": (folders["8b"], arguments)}, H100) == {"target": 0.5}


def test_models_that_do_not_fit_together_are_refused(folders: dict[str, Path]) -> None:
    both = {"target": (folders["32b"], DUMMY), "draft": (folders["8b"], DUMMY)}
    with pytest.raises(ConfigurationError, match=r"do not fit into the GPU's 79 GiB together \(target 63\.\d GiB, dra"):
        memory_shares(both, H100)
