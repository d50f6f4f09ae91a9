"""The GPUs of engines, and the division of the memory of those that they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.gpus import (
    PlannedEngine,
    context_that_fits,
    explain_room,
    fill_parallel_size,
    kv_cache_bytes_per_token,
    memory_shares,
    place_engines,
    plan_memory,
    visible_devices,
    weight_bytes,
)
from lookahead_agent.models.catalogue import CATALOGUE

GIB = 2**30
H100 = 85_014_020_096
QWEN3 = {
    **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "torch_dtype": "bfloat16"},
    "max_position_embeddings": 40960,
}
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
_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_MODELS: dict[str, tuple[tuple[int, ...], dict[str, Any], int]] = {
    "Qwen/Qwen3-32B": ((5120, 25600, 64, 64, 8), QWEN3, 32_762_123_264),
    "Qwen/Qwen3-8B": ((4096, 12288, 36, 32, 8), QWEN3, 8_190_735_360),
    "Qwen/Qwen3-1.7B": ((2048, 6144, 28, 16, 8), QWEN3 | {"tie_word_embeddings": True}, 1_720_574_976),
    "Qwen/Qwen3-0.6B": ((1024, 3072, 28, 16, 8), QWEN3 | {"tie_word_embeddings": True}, 596_049_920),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": ((5120, 27648, 64, 40, 8), {"vocab_size": 152064}, 32_763_876_352),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ((1536, 8960, 28, 12, 2), {"vocab_size": 151936}, 1_777_088_000),
    "Qwen/Qwen2.5-7B-Instruct": ((3584, 18944, 28, 28, 4), {"vocab_size": 152064}, 7_615_616_512),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": (
        *((1536, 8960, 28, 12, 2), {"vocab_size": 151936, "tie_word_embeddings": True}),
        1_543_714_304,
    ),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": (
        *((896, 4864, 24, 14, 2), {"vocab_size": 151936, "tie_word_embeddings": True}),
        494_032_768,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        *((576, 1536, 30, 9, 3), {"vocab_size": 49152, "tie_word_embeddings": True}),
        134_515_008,
    ),
}
"""Shapes and numbers of weights of the catalogue's models and their judge, as published."""
ROOM: dict[str, dict[int, tuple[int, int, int]]] = {
    "qwen2.5-coder-1.5b": {
        24: (625_552, 348_224, 1_358_816),
        40: (1_176_816, 734_112, 2_461_312),
        48: (1_452_432, 927_040, 3_012_560),
        80: (2_554_944, 1_698_800, 5_217_568),
    },
    "qwen2.5-coder-1.5b-smollm2": {
        24: (625_552, 289_728, 1_358_816),
        40: (1_176_816, 595_360, 2_461_312),
        48: (1_452_432, 748_192, 3_012_560),
        80: (2_554_944, 1_359_472, 5_217_568),
    },
    "qwen3-8b": {
        24: (31_456, 2_896, 174_048),
        40: (138_656, 63_200, 388_416),
        48: (192_240, 93_344, 495_600),
        80: (406_624, 213_920, 924_352),
    },
    "qwen3-32b": {
        24: (0, 0, 0),
        40: (0, 0, 31_008),
        48: (0, 0, 91_312),
        80: (41_248, 12_432, 332_480),
    },
    "deepseek-r1-distill-qwen-32b": {
        24: (0, 0, 0),
        40: (0, 0, 31_008),
        48: (0, 0, 91_296),
        80: (41_248, 15_728, 332_464),
    },
}
"""Tokens of context by set and GiB of a GPU: for the target, for it with its draft, and for it on two such GPUs."""
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


@pytest.fixture
def catalogue(tmp_path: Path) -> dict[str, Path]:
    """Folders of the catalogue's models by Hub id, with shapes and without weights."""
    folders = {}
    for name, (sizes, more, _) in _MODELS.items():
        folders[name] = tmp_path / name
        folders[name].mkdir(parents=True)
        config = {"max_position_embeddings": 32768, "torch_dtype": "bfloat16"} | dict(zip(_FIELDS, sizes, strict=True))
        (folders[name] / "config.json").write_text(json.dumps(config | more))
    return folders


def test_weights_of_the_catalogue_have_their_published_sizes(catalogue: dict[str, Path]) -> None:
    for name, (_, _, count) in _MODELS.items():
        assert weight_bytes(catalogue[name], {}) / 2 == pytest.approx(count, rel=0.001), name


@pytest.mark.parametrize("name", CATALOGUE)
def test_room_of_every_set_on_gpus_that_people_have(catalogue: dict[str, Path], name: str) -> None:
    models = CATALOGUE[name]
    assert models.draft is not None
    alone: dict[str, PlannedEngine] = {"target": (catalogue[models.target.hub_id], {})}
    pair = alone | {"draft": (catalogue[models.draft.hub_id], {})}
    judged = pair | ({"judge": (catalogue[models.judge.hub_id], {})} if models.judge is not None else {})
    sharded: dict[str, PlannedEngine] = {"target": (alone["target"][0], {"tensor_parallel_size": 2})}
    assert list(ROOM[name]) == [24, 40, 48, 80]
    for gib, (target, both, on_two) in ROOM[name].items():
        total = gib * GIB
        assert context_that_fits(sharded, total) == on_two, gib
        assert context_that_fits(alone, total) == target, gib
        assert context_that_fits(pair, total) == both, gib
        own = plan_memory(pair, place_engines({role: {} for role in pair}, {}, 2), [total, total])
        assert (own.shares, own.room) == ({}, target), "the draft takes the second GPU, and its room"
        assert models.judge is None or context_that_fits(judged, total) == 0, "the paper's judge needs a second GPU"
        if not both:
            with pytest.raises(ConfigurationError, match="do not fit into"):
                memory_shares(pair, total)
            continue
        shares = memory_shares(pair, total)
        assert sum(shares.values()) == pytest.approx(0.92, abs=0.001)
        for role, engine in pair.items():
            cache = shares[role] * total - weight_bytes(*engine) - 2.5 * GIB
            assert cache / kv_cache_bytes_per_token(*engine) >= both * 0.99 - 16, "each engine caches the context"


def test_share_of_a_judge_follows_from_its_weights(catalogue: dict[str, Path]) -> None:
    names = {"target": "Qwen/Qwen3-8B", "draft": "Qwen/Qwen3-0.6B", "judge": "Qwen/Qwen2.5-7B-Instruct"}
    engines: dict[str, PlannedEngine] = {role: (catalogue[name], {}) for role, name in names.items()}
    shares = memory_shares(engines, 80 * GIB)
    assert sum(shares.values()) == pytest.approx(0.92, abs=0.001)
    cached = shares["judge"] * 80 * GIB - weight_bytes(*engines["judge"]) - 2.5 * GIB
    assert cached / kv_cache_bytes_per_token(*engines["judge"]) == pytest.approx(16384, rel=0.01)
    quantized = engines | {"judge": (engines["judge"][0], {"quantization": "fp8"})}
    assert memory_shares(quantized, 80 * GIB)["judge"] < shares["judge"]


def test_explanation_says_what_makes_room_with_the_tokens(catalogue: dict[str, Path]) -> None:
    engines: dict[str, PlannedEngine] = {
        "target": (catalogue["Qwen/Qwen3-8B"], {}),
        "draft": (catalogue["Qwen/Qwen3-0.6B"], {}),
    }
    found = explain_room(engines, 24 * GIB)
    assert found.startswith("target and draft share a GPU of 24 GiB with room for 2896 tokens of context; more room: ")
    assert "fp8 weights (engine_args={'quantization': 'fp8'}) 31072 tokens" in found
    assert "an fp8 cache ({'kv_cache_dtype': 'fp8'}) 5824 tokens" in found
    assert "a second GPU, or the target alone, 31456 tokens" in found
    assert "{'tensor_parallel_size': 2}) 40960 tokens" in found, "no more than the trained context"
    assert "more room" not in explain_room(engines, 80 * GIB)
    long = {"target": (engines["target"][0], {"max_model_len": 40960})}
    found = explain_room(long, 24 * GIB)
    assert "a shorter context ({'max_model_len': 31456}) 31456 tokens" in found
    assert "a second GPU" not in found, "the target has the first for itself"
    short = {"target": (engines["target"][0], {"max_model_len": 8192})}
    assert "more room" not in explain_room(short, 24 * GIB)


def test_lone_target_with_little_room_has_it_explained(catalogue: dict[str, Path]) -> None:
    alone: dict[str, PlannedEngine] = {"target": (catalogue["Qwen/Qwen3-32B"], {})}
    plan = plan_memory(alone, {"target": [0]}, [48 * GIB])
    assert plan.shares == {}
    assert plan.explanation.startswith("target has a GPU of 48 GiB with room for 0 tokens of context; more room: fp8")
    assert "{'tensor_parallel_size': 2}) 40960 tokens" in plan.explanation
    assert plan_memory(alone, {"target": [0]}, [80 * GIB]).explanation == ""


def test_engines_are_placed_on_gpus_of_their_own() -> None:
    def place(visible: int, gpus: dict[str, str] | None = None, **arguments: dict[str, Any]) -> dict[str, list[int]]:
        roles = {role: arguments.get(role, {}) for role in ("target", "draft", "judge")}
        return place_engines(roles, gpus or {}, visible)

    assert place(1) == {"target": [0], "draft": [0], "judge": [0]}
    assert place(2) == {"target": [0], "draft": [1], "judge": [1]}, "the judge shares the draft's"
    assert place(3) == {"target": [0], "draft": [1], "judge": [2]}
    two = {"tensor_parallel_size": 2}
    assert place(4, target=two) == {"target": [0, 1], "draft": [2], "judge": [3]}
    assert place(2, target=two) == {"target": [0, 1], "draft": [0], "judge": [0]}
    assert place(4, {"target": "2,3"}, target=two) == {"target": [2, 3], "draft": [0], "judge": [1]}
    assert place(4, {"draft": "0", "judge": "0"}, target=two) == {"draft": [0], "judge": [0], "target": [1, 2]}
    with pytest.raises(ConfigurationError, match="names GPU 4, and 4 are visible"):
        place(4, {"draft": "4"})


def test_engines_on_overlapping_gpus_share_them(folders: dict[str, Path]) -> None:
    engines: dict[str, PlannedEngine] = {
        "target": (folders["8b"], {"tensor_parallel_size": 2}),
        "draft": (folders["1.7b"], {}),
        "judge": (folders["1.7b"], {}),
    }
    plan = plan_memory(engines, {"target": [0, 1], "draft": [1], "judge": [2]}, [H100] * 3)
    assert plan.shares.keys() == {"target", "draft"}
    assert plan.shares == memory_shares({role: engines[role] for role in plan.shares}, H100)
    assert "the judge has GPU 2 of its own" in plan.explanation


def test_gpus_shard_an_engine_unless_its_arguments_do() -> None:
    assert fill_parallel_size({}, None, "target") == fill_parallel_size({}, "3", "target") == {}
    assert fill_parallel_size({}, "0, 2", "target") == {"tensor_parallel_size": 2}
    four = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert fill_parallel_size(four, "0,1,2,3", "target") == four
    with pytest.raises(ConfigurationError, match="need 4 GPUs"):
        fill_parallel_size(four, "0,1", "target")
    for text in ("", "0,", "a", "0,0", "-1", "0,00"):
        with pytest.raises(ConfigurationError, match="the numbers of the GPUs"):
            fill_parallel_size({}, text, "draft")


def test_variable_names_devices_among_the_visible_ones() -> None:
    assert visible_devices([0, 2], None) == visible_devices([0, 2], "") == "0,2"
    assert visible_devices([1], "4,6") == "6"
    assert visible_devices([0], "GPU-6e5f, GPU-8c1d") == "GPU-6e5f"


def test_heads_are_replicated_beyond_their_number(folders: dict[str, Path]) -> None:
    whole = kv_cache_bytes_per_token(folders["8b"], {})
    sizes = {4: whole // 4, 8: whole // 8, 16: whole // 8}
    assert {size: kv_cache_bytes_per_token(folders["8b"], {"tensor_parallel_size": size}) for size in sizes} == sizes
    assert kv_cache_bytes_per_token(folders["8b"], {"pipeline_parallel_size": 4}) == whole // 4


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
    pair = {"target": (folders["8b"], DUMMY), "draft": (folders["1.7b"], DUMMY)}
    assert context_that_fits(pair, H100) > 100_000
    assert context_that_fits({"target": pair["target"]}, 24 * GIB) == pytest.approx(31_000, rel=0.1)
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
