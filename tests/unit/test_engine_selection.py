"""Engine selection: the configuration and precisions that follow from settings, models and platform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cpu import INT8
from lookahead_agent.engines.shared_draft_proposer import ACCEPTANCE, COSTS
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.vllm_config import uses_shared_draft
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.cache import GGUF
from lookahead_agent.models.conversion import folder_of_form
from lookahead_agent.models.resolve import choose_models
from lookahead_agent.modes.chooser import ModeChooser
from lookahead_agent.modes.record import Quantity
from lookahead_agent.modes.table import Mode
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
AVX2 = Platform(on_cpu=True, dot_products=False)
WITH_INT8 = Platform(on_cpu=True)
GPU = Platform(on_cpu=False)


def model(folder: Path, config: dict[str, Any], words: list[str] = WORDS) -> Path:
    tokenizer_in(folder, words)
    full = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151936, **config}
    (folder / "config.json").write_text(json.dumps(full))
    return folder


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path / "cache"))
    return model(tmp_path / "target", LARGE), model(tmp_path / "draft", SMALL)


def select(pair: tuple[Path, Path], platform: Platform = PLAIN, **options: Any) -> EngineSetup:
    return select_engines(RuntimeSpec(MODELS, **options), *pair, platform)


def keep_replies(modes: ModeChooser, mode: Mode, found: dict[Quantity, float]) -> None:
    for _ in range(3):
        modes.keep(modes.learn("node", mode, found))


def folder_of(weights: Weights | None) -> Path:
    assert weights is not None
    return weights.folder


def test_default_selection_takes_the_fastest_configuration_and_gives_the_reason(pair: tuple[Path, Path]) -> None:
    setup = select(pair, WITH_INT8)
    assert setup.precision == {"target": "int8", "draft": "int8"}
    assert setup.speculation_method == "draft_model"
    assert setup.target is not None
    assert setup.target.arguments["dtype"] == "bfloat16"
    assert setup.target_arguments["speculative_config"]["num_speculative_tokens"] == setup.draft_tokens == 2
    by_batch_size = setup.target_arguments["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert by_batch_size[0] == (1, 1, 2)
    assert by_batch_size[-1][1:] == (32, 0)
    assert setup.configuration is not None
    assert setup.configuration.name in setup.reason
    assert setup.modes.record is not None
    assert setup.modes.configuration == setup.configuration.name
    assert not setup.draft_engine


@pytest.mark.parametrize(("platform", "precision"), [(PLAIN, "fp32"), (AVX2, "int8"), (WITH_INT8, "int8")])
def test_default_precision_depends_on_the_cpus_int8_instructions(
    pair: tuple[Path, Path], platform: Platform, precision: str
) -> None:
    setup = select(pair, platform)
    assert setup.precision["target"] == precision
    assert setup.target is not None
    assert setup.target.arguments["dtype"] == ("bfloat16" if platform is WITH_INT8 else "float32")
    assert folder_of(setup.target) == (folder_of_form(pair[0], "int8") if precision == "int8" else pair[0])


def test_measured_replies_change_the_next_selection(pair: tuple[Path, Path]) -> None:
    first = select(pair, WITH_INT8)
    keep_replies(first.modes, "sd", {"writing": 0.05, "acceptance": 0.7})
    again = select(pair, WITH_INT8)
    assert again.draft_tokens == 1, "the measured acceptance rate is lower"
    forced = select(pair, WITH_INT8, token_speculation="shared_draft")
    assert forced.target_arguments["additional_config"][ACCEPTANCE] == 0.7
    alone = select(pair, WITH_INT8, token_speculation="none")
    assert alone.modes.configuration == "none, target int8"
    keep_replies(alone.modes, "off", {"writing": 0.03})
    assert select(pair, WITH_INT8).speculation_method == "none"


def test_paces_of_other_engines_are_not_those_of_the_target_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    looks_up = select(pair, WITH_INT8, token_speculation="ngram")
    assert looks_up.modes.configuration == "ngram, target int8"
    other = model(tmp_path / "other", SMALL, ["<eos>", "?", "x", "y"])
    beside = select((pair[0], other), WITH_INT8, draft_engine=True)
    assert beside.modes.configuration == "none, target int8, draft int8, beside a draft"
    keep_replies(looks_up.modes, "sd", {"writing": 0.001})
    keep_replies(beside.modes, "off", {"writing": 0.001})
    assert "none, target int8" not in select(pair, WITH_INT8).modes.paces()


def test_every_platform_keeps_the_paces_of_its_replies_except_those_of_servers(pair: tuple[Path, Path]) -> None:
    keep_replies(select(pair, GPU, draft_engine=True).modes, "lr+sd", {"writing": 0.01})
    assert "lr+sd" in "".join(select(pair, GPU).modes.table())
    assert select(pair, GPU, target_arguments={"tensor_parallel_size": 2}).modes.table() == [], "it is another machine"
    assert select_engines(RuntimeSpec(MODELS), None, pair[1], GPU).modes.record is None


def test_requested_int8_is_converted_only_on_a_cpu_that_supports_it(pair: tuple[Path, Path]) -> None:
    requested = {"draft_engine": True, "precision": "int8", "draft_precision": "int8"}
    with pytest.raises(ConfigurationError, match="choose fp32 or bf16"):
        select(pair, **requested)
    setup = select(pair, WITH_INT8, **requested)
    assert folder_of(setup.target) == folder_of_form(pair[0], "int8") != pair[0]
    assert folder_of(setup.draft) == folder_of_form(pair[1], "int8")
    assert setup.precision == {"target": "int8", "draft": "int8"}
    assert setup.target is not None
    assert setup.draft is not None
    assert setup.target.arguments["dtype"] == "bfloat16"
    assert setup.target.arguments["quantization"] == setup.draft.arguments["quantization"] == INT8
    in_engine = select(pair, WITH_INT8, precision="int8", draft_precision="int8", token_speculation="draft_model")
    assert in_engine.target_arguments["speculative_config"]["quantization"] == INT8
    assert folder_of(in_engine.draft) == Path(in_engine.target_arguments["speculative_config"]["model"])
    foreign = select(
        pair, WITH_INT8, precision="int8", token_speculation={"method": "draft_model", "model": "/somebody/s"}
    )
    assert "quantization" not in foreign.target_arguments["speculative_config"], "unknown for a foreign draft"
    assert foreign.draft is None, "no weights of a foreign draft are selected"


def test_gguf_weights_are_converted_to_the_selected_precision(pair: tuple[Path, Path]) -> None:
    for folder in pair:
        (folder / GGUF).write_bytes(b"GGUF")
    int8 = select(pair, WITH_INT8)
    assert int8.target is not None
    assert (int8.target.form, folder_of(int8.target)) == ("int8", folder_of_form(pair[0], "int8"))
    floats = select(pair, WITH_INT8, precision="bf16")
    assert folder_of(floats.target) == folder_of_form(pair[0], "bf16") != pair[0]
    assert folder_of(select(pair, GPU).target) == folder_of_form(pair[0], "bf16")
    judge = judge_weights(pair[1], {}, WITH_INT8)
    assert (judge.folder, judge.arguments["dtype"]) == (folder_of_form(pair[1], "bf16"), "bfloat16")
    assert judge_weights(pair[1], {}, PLAIN).arguments["dtype"] == "float32"
    assert default_weights(pair[0], WITH_INT8).form == "int8"
    assert default_weights(pair[0], PLAIN).form == default_weights(pair[0], GPU).form == "bf16"


def test_step_speculation_selects_a_draft_engine_and_a_shared_draft(pair: tuple[Path, Path]) -> None:
    setup = select(pair, draft_engine=True)
    assert setup.draft_engine
    assert setup.draft is not None
    assert setup.speculation_method == "shared_draft"
    assert uses_shared_draft(setup.target_arguments["speculative_config"])
    costs = setup.target_arguments["additional_config"][COSTS]
    assert costs[1] < costs[128]


@pytest.mark.parametrize(("method", "engine"), [("none", False), ("draft_model", False), ("shared_draft", True)])
def test_requested_speculation_method_is_used(pair: tuple[Path, Path], method: str, *, engine: bool) -> None:
    setup = select(pair, token_speculation=method)
    assert setup.speculation_method == method
    assert setup.draft_engine == engine
    assert ("speculative_config" in setup.target_arguments) == (method != "none")
    assert (setup.draft is None) == (method == "none"), "unused weights are not selected"


def test_requested_precision_is_used_and_conflicts_are_refused(pair: tuple[Path, Path]) -> None:
    setup = select(pair, precision="bf16", draft_precision="fp32", token_speculation="shared_draft")
    assert setup.precision == {"target": "bf16", "draft": "fp32"}
    assert folder_of(setup.draft) == pair[1]
    assert setup.draft is not None
    assert setup.draft.arguments == {"dtype": "float32"}
    by_argument = select(pair, target_arguments={"dtype": "bfloat16"}, token_speculation="none")
    assert by_argument.precision["target"] == "bf16"
    with pytest.raises(ConfigurationError, match="disagree"):
        select(pair, precision="bf16", target_arguments={"dtype": "float32"})


def test_compiled_engines_have_a_precision_that_vllm_can_compile(pair: tuple[Path, Path]) -> None:
    compiled = {"target_arguments": {"enforce_eager": False}}
    assert select(pair, WITH_INT8, **compiled).precision["target"] == "bf16"
    with pytest.raises(ConfigurationError, match="cannot compile the kernels of int8"):
        select(pair, WITH_INT8, precision="int8", **compiled)


def test_quantized_model_is_neither_converted_nor_given_a_dtype(pair: tuple[Path, Path]) -> None:
    config = json.loads((pair[0] / "config.json").read_text())
    (pair[0] / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    setup = select(pair, token_speculation="none")
    assert folder_of(setup.target) == pair[0]
    assert setup.target is not None
    assert "dtype" not in setup.target.arguments


def test_draft_with_another_vocabulary_disables_token_speculation(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = model(tmp_path / "other", SMALL, ["<eos>", "?", "x", "y"])
    for method in ("shared_draft", "draft_model"):
        with pytest.raises(ConfigurationError, match="another tokenizer"):
            select((pair[0], other), token_speculation=method)
    assert select((pair[0], other)).speculation_method == "none"
    steps = select((pair[0], other), draft_engine=True)
    assert folder_of(steps.draft) == other
    assert steps.speculation_method == "none"
    assert steps.precision["draft"] == "fp32"


def test_token_speculation_needs_a_draft_model(pair: tuple[Path, Path]) -> None:
    setup = select_engines(RuntimeSpec(MODELS), pair[0], None, PLAIN)
    assert setup.speculation_method == "none"
    with pytest.raises(ConfigurationError, match="needs a draft model"):
        select_engines(RuntimeSpec(MODELS, token_speculation="shared_draft"), pair[0], None, PLAIN)


def test_gpu_keeps_the_models_precision_unless_another_is_requested(pair: tuple[Path, Path]) -> None:
    setup = select(pair, GPU, draft_engine=True)
    assert setup.precision == {}
    assert setup.target is not None
    assert "dtype" not in setup.target.arguments
    requested = select(pair, GPU, precision="int8", token_speculation="none")
    assert folder_of(requested.target) == folder_of_form(pair[0], "w8a8")


def test_gpu_default_is_the_target_alone_and_steps_bring_a_shared_draft(pair: tuple[Path, Path]) -> None:
    alone = select(pair, GPU)
    assert (alone.speculation_method, alone.draft_engine, alone.draft) == ("none", False, None)
    assert alone.target_arguments == {}
    assert "known as an upper bound only" in alone.reason
    steps = select(pair, GPU, draft_engine=True)
    assert (steps.speculation_method, steps.draft_engine, steps.alone_when_busy) == ("shared_draft", True, True)
    assert uses_shared_draft(steps.target_arguments["speculative_config"])
    requested = select(pair, GPU, token_speculation="shared_draft")
    assert uses_shared_draft(requested.target_arguments["speculative_config"])
    assert (requested.reason, requested.alone_when_busy) == ("", False), "the user chose the method"
    assert not select(pair, PLAIN).alone_when_busy, "on CPUs, measurements decide"


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_multi_gpu_target_runs_alone_unless_a_draft_is_requested(pair: tuple[Path, Path], size: str) -> None:
    setup = select(pair, GPU, target_arguments={size: 2})
    assert (setup.speculation_method, setup.draft_engine) == ("none", False)
    assert select(pair, GPU, target_arguments={size: 2}, draft_engine=True).draft_engine
    requested = select(pair, GPU, target_arguments={size: 2}, token_speculation="shared_draft")
    assert requested.speculation_method == "shared_draft"


def test_draft_of_a_remote_target_has_its_own_precision(pair: tuple[Path, Path]) -> None:
    setup = select_engines(RuntimeSpec(MODELS, token_speculation="none", draft_engine=True), None, pair[1], AVX2)
    assert setup.target is None
    assert folder_of(setup.draft) == folder_of_form(pair[1], "int8")
    assert setup.draft is not None
    assert setup.draft.arguments == {"quantization": INT8, "dtype": "float32"}


def test_tokenizers_are_loaded_for_comparison_only_if_their_files_differ(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = pair
    loaded: list[Path] = []

    def tokenizer(folder: Path) -> HFTokenizer:
        loaded.append(folder)
        return HFTokenizer(folder)

    assert same_vocabulary(target, draft, tokenizer)
    assert not loaded
    (draft / "tokenizer_config.json").write_text('{"padding_side": "left"}')
    assert same_vocabulary(target, draft, tokenizer), "the settings differ, but the tokens are the same"
    assert loaded == [target, draft]
    assert not same_vocabulary(target, model(tmp_path / "other", SMALL, [*WORDS, "another"]))
