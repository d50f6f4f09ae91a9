"""From a user's settings to the engines that are started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cpu import INT8, INT8_WEIGHTS
from lookahead_agent.engines.shared_draft_proposer import COSTS
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.vllm_config import uses_shared_draft
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.cache import GGUF
from lookahead_agent.models.conversion import converted_folder
from lookahead_agent.models.resolve import choose_models
from lookahead_agent.runtime.engine_selection import (
    EngineSetup,
    RuntimeSpec,
    default_weights,
    same_vocabulary,
    select_engines,
)
from lookahead_agent.runtime.weights import Platform, Weights, judge_weights
from tests.unit.fake_vllm import WORDS, tokenizer_in

MODELS = choose_models("qwen2.5-coder-1.5b")
LARGE = {"hidden_size": 1536, "num_hidden_layers": 28, "intermediate_size": 8960}
SMALL = {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864}
PLAIN = Platform(on_cpu=True, int8=False)
WITH_INT8 = Platform(on_cpu=True, int8=True)
GPU = Platform(on_cpu=False, int8=True)


def model(folder: Path, config: dict[str, Any], words: list[str] = WORDS) -> Path:
    tokenizer_in(folder, words)
    whole = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151936, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path / "cache"))
    return model(tmp_path / "target", LARGE), model(tmp_path / "draft", SMALL)


def setup(pair: tuple[Path, Path], platform: Platform = PLAIN, **asked: Any) -> EngineSetup:
    return select_engines(RuntimeSpec(MODELS, **asked), *pair, platform, lambda _: 20_000)


def folder_of(weights: Weights | None) -> Path:
    assert weights is not None
    return weights.folder


def test_by_default_it_takes_the_fastest_and_says_why(pair: tuple[Path, Path]) -> None:
    found = setup(pair, WITH_INT8)
    assert found.precision == {"target": "int8", "draft": "int8"}
    assert found.speculation_method == "draft_model"
    assert found.target is not None
    assert found.target.arguments["dtype"] == "bfloat16"
    assert found.target_arguments["speculative_config"]["num_speculative_tokens"] == found.draft_tokens == 2
    by_batch_size = found.target_arguments["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert by_batch_size[0] == (1, 1, 2)
    assert by_batch_size[-1][1:] == (32, 0)
    assert found.configuration is not None
    assert found.configuration.name in found.reason
    assert found.speeds is not None
    assert not found.draft_engine


@pytest.mark.parametrize(("platform", "precision"), [(PLAIN, "int8-weights"), (WITH_INT8, "int8")])
def test_int8_is_taken_by_default_where_the_processor_multiplies_it(
    pair: tuple[Path, Path], platform: Platform, precision: str
) -> None:
    found = setup(pair, platform)
    assert found.precision["target"] == precision
    assert folder_of(found.target) == (converted_folder(pair[0], "int8") if precision == "int8" else pair[0])


def test_measured_replies_change_the_choice_of_the_next_start(pair: tuple[Path, Path]) -> None:
    first = setup(pair, WITH_INT8)
    assert first.speeds is not None
    assert first.configuration is not None
    for _ in range(3):
        first.speeds.add(first.configuration.name, 0.05, acceptance_rate=0.7)
    again = setup(pair, WITH_INT8)
    assert again.draft_tokens == 1, "fewer are accepted"
    for _ in range(3):
        first.speeds.add("none, target int8", 0.03)
    assert setup(pair, WITH_INT8).speculation_method == "none"


def test_int8_is_converted_where_it_is_asked_for_and_the_processor_has_it(pair: tuple[Path, Path]) -> None:
    asked = {"draft_engine": True, "precision": "int8", "draft_precision": "int8"}
    with pytest.raises(ConfigurationError, match="choose the precision int8-weights"):
        setup(pair, **asked)
    found = setup(pair, WITH_INT8, **asked)
    assert folder_of(found.target) == converted_folder(pair[0], "int8") != pair[0]
    assert folder_of(found.draft) == converted_folder(pair[1], "int8")
    assert found.precision == {"target": "int8", "draft": "int8"}
    assert found.target is not None
    assert found.draft is not None
    assert found.target.arguments["dtype"] == "bfloat16"
    assert found.target.arguments["quantization"] == found.draft.arguments["quantization"] == INT8
    method = setup(pair, WITH_INT8, precision="int8", draft_precision="int8", token_speculation="draft_model")
    assert method.target_arguments["speculative_config"]["quantization"] == INT8
    assert folder_of(method.draft) == Path(method.target_arguments["speculative_config"]["model"])
    another = setup(
        pair, WITH_INT8, precision="int8", token_speculation={"method": "draft_model", "model": "/somebody/s"}
    )
    assert "quantization" not in another.target_arguments["speculative_config"], "not ours, not known"
    assert another.draft is None, "no weights of it are needed"


def test_gguf_weights_are_converted_to_the_precision_that_runs(pair: tuple[Path, Path]) -> None:
    for folder in pair:
        (folder / GGUF).write_bytes(b"GGUF")
    int8 = setup(pair, WITH_INT8)
    assert int8.target is not None
    assert (int8.target.form, folder_of(int8.target)) == ("int8", converted_folder(pair[0], "int8"))
    floats = setup(pair, WITH_INT8, precision="bf16")
    assert folder_of(floats.target) == converted_folder(pair[0], "bf16") != pair[0]
    assert folder_of(setup(pair, GPU).target) == converted_folder(pair[0], "bf16")
    judge = judge_weights(pair[1], {}, WITH_INT8)
    assert (judge.folder, judge.arguments["dtype"]) == (converted_folder(pair[1], "bf16"), "bfloat16")
    assert judge_weights(pair[1], {}, PLAIN).arguments["dtype"] == "float32"
    assert default_weights(pair[0], WITH_INT8).form == "int8"
    assert default_weights(pair[0], PLAIN).form == default_weights(pair[0], GPU).form == "bf16"


def test_steps_have_a_draft_engine_and_a_shared_draft(pair: tuple[Path, Path]) -> None:
    found = setup(pair, draft_engine=True)
    assert found.draft_engine
    assert found.draft is not None
    assert found.speculation_method == "shared_draft"
    assert uses_shared_draft(found.target_arguments["speculative_config"])
    costs = found.target_arguments["additional_config"][COSTS]
    assert costs[1] < costs[128]


@pytest.mark.parametrize(("method", "engine"), [("none", False), ("draft_model", False), ("shared_draft", True)])
def test_a_method_that_is_given_is_taken(pair: tuple[Path, Path], method: str, *, engine: bool) -> None:
    found = setup(pair, token_speculation=method)
    assert found.speculation_method == method
    assert found.draft_engine == engine
    assert ("speculative_config" in found.target_arguments) == (method != "none")
    assert (found.draft is None) == (method == "none"), "weights that nothing uses are not converted"


def test_a_precision_that_is_given_is_taken(pair: tuple[Path, Path]) -> None:
    found = setup(pair, precision="bf16", draft_precision="int8-weights", token_speculation="shared_draft")
    assert found.precision == {"target": "bf16", "draft": "int8-weights"}
    assert folder_of(found.draft) == pair[1]
    assert found.draft is not None
    assert found.draft.arguments["quantization"] == INT8_WEIGHTS
    by_argument = setup(pair, target_arguments={"dtype": "bfloat16"}, token_speculation="none")
    assert by_argument.precision["target"] == "bf16"
    with pytest.raises(ConfigurationError, match="disagree"):
        setup(pair, precision="bf16", target_arguments={"dtype": "float32"})
    with pytest.raises(ConfigurationError, match="int8-weights is for CPUs"):
        setup(pair, GPU, precision="int8-weights")


def test_what_vllm_is_to_compile_is_in_a_precision_that_it_can(pair: tuple[Path, Path]) -> None:
    compiled = {"target_arguments": {"enforce_eager": False}}
    assert setup(pair, WITH_INT8, **compiled).precision["target"] == "bf16"
    with pytest.raises(ConfigurationError, match="cannot compile the kernels of int8"):
        setup(pair, WITH_INT8, precision="int8", **compiled)


def test_a_model_that_is_quantized_already_is_left_as_it_is(pair: tuple[Path, Path]) -> None:
    config = json.loads((pair[0] / "config.json").read_text())
    (pair[0] / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    found = setup(pair, token_speculation="none")
    assert folder_of(found.target) == pair[0]
    assert found.target is not None
    assert "dtype" not in found.target.arguments


def test_a_draft_with_another_vocabulary_drafts_no_tokens(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = model(tmp_path / "other", SMALL, ["<eos>", "?", "x", "y"])
    for method in ("shared_draft", "draft_model"):
        with pytest.raises(ConfigurationError, match="another tokenizer"):
            setup((pair[0], other), token_speculation=method)
    assert setup((pair[0], other)).speculation_method == "none"
    steps = setup((pair[0], other), draft_engine=True)
    assert folder_of(steps.draft) == other
    assert steps.speculation_method == "none"
    assert steps.precision["draft"] == "int8-weights"


def test_without_a_draft_there_are_no_draft_tokens(pair: tuple[Path, Path]) -> None:
    found = select_engines(RuntimeSpec(MODELS), pair[0], None, PLAIN)
    assert found.speculation_method == "none"
    with pytest.raises(ConfigurationError, match="needs a draft model"):
        select_engines(RuntimeSpec(MODELS, token_speculation="shared_draft"), pair[0], None, PLAIN)


def test_on_a_gpu_the_folder_says_how_its_weights_are(pair: tuple[Path, Path]) -> None:
    found = setup(pair, GPU, draft_engine=True)
    assert found.precision == {}
    assert found.target is not None
    assert "dtype" not in found.target.arguments
    asked = setup(pair, GPU, precision="int8", token_speculation="none")
    assert folder_of(asked.target) == converted_folder(pair[0], "int8")


def test_a_gpu_has_a_shared_draft_which_rests_while_several_requests_run(pair: tuple[Path, Path]) -> None:
    for found in setup(pair, GPU, draft_engine=True), setup(pair, GPU):
        assert (found.speculation_method, found.draft_engine, found.alone_when_busy) == ("shared_draft", True, True)
        assert uses_shared_draft(found.target_arguments["speculative_config"])
    asked = setup(pair, GPU, token_speculation="shared_draft")
    assert uses_shared_draft(asked.target_arguments["speculative_config"])
    assert not asked.alone_when_busy, "a user has said how"
    assert not setup(pair, PLAIN).alone_when_busy, "on a CPU it is measured"


def test_a_gpu_without_room_for_a_draft_has_the_target_alone(pair: tuple[Path, Path]) -> None:
    spec = RuntimeSpec(MODELS)
    alone = select_engines(spec, *pair, GPU, lambda _: 2900)
    assert (alone.speculation_method, alone.draft_engine, alone.draft) == ("none", False, None)
    assert alone.reason == "beside a draft the GPU has room for 2900 tokens"
    short = json.loads((pair[0] / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (pair[0] / "config.json").write_text(json.dumps(short))
    assert select_engines(spec, *pair, GPU, lambda _: 2900).draft_engine, "the whole context has room"
    forced = select_engines(RuntimeSpec(MODELS, draft_engine=True), *pair, GPU, lambda _: 2900)
    assert forced.draft_engine, "a user has asked for it"


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_a_target_on_several_gpus_writes_alone_unless_a_user_asks(pair: tuple[Path, Path], size: str) -> None:
    found = setup(pair, GPU, target_arguments={size: 2})
    assert (found.speculation_method, found.draft_engine) == ("none", False)
    assert setup(pair, GPU, target_arguments={size: 2}, draft_engine=True).draft_engine
    asked = setup(pair, GPU, target_arguments={size: 2}, token_speculation="shared_draft")
    assert asked.speculation_method == "shared_draft"


def test_a_draft_whose_target_is_elsewhere_has_its_own_precision(pair: tuple[Path, Path]) -> None:
    found = select_engines(RuntimeSpec(MODELS, token_speculation="none", draft_engine=True), None, pair[1], PLAIN)
    assert found.target is None
    assert folder_of(found.draft) == pair[1]
    assert found.draft is not None
    assert found.draft.arguments == {"quantization": INT8_WEIGHTS, "dtype": "float32"}


def test_vocabularies_are_compared_by_their_files_and_read_only_where_these_differ(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = pair
    read: list[Path] = []

    def tokenizer(folder: Path) -> HFTokenizer:
        read.append(folder)
        return HFTokenizer(folder)

    assert same_vocabulary(target, draft, tokenizer)
    assert not read
    (draft / "tokenizer_config.json").write_text('{"padding_side": "left"}')
    assert same_vocabulary(target, draft, tokenizer), "other settings, but the same tokens"
    assert read == [target, draft]
    assert not same_vocabulary(target, model(tmp_path / "other", SMALL, [*WORDS, "another"]))
