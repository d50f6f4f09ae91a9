"""What is wanted of the engines, and what is started for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cpu.cores import available_cores, share_cores
from lookahead_agent.cpu.names import INT8, INT8_WEIGHTS
from lookahead_agent.engines.shared_draft_proposer import COSTS
from lookahead_agent.engines.token_speculation import uses_shared_draft
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import Times
from lookahead_agent.hardware.kernels import KernelTimes
from lookahead_agent.progress import LogProgress
from lookahead_agent.runtime import engine_selection
from lookahead_agent.runtime.engine_selection import EngineRequest, EngineSetup, one_vocabulary, select_engines
from tests.unit.fake_vllm import WORDS, tokenizer_in
from tests.unit.test_hardware_choice import PLAIN, PLAIN_ONE_CORE, WITH_INT8, WITH_INT8_ONE_CORE

LARGE = {"hidden_size": 1536, "num_hidden_layers": 28, "intermediate_size": 8960}
SMALL = {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864}


def model(folder: Path, config: dict[str, Any], words: list[str] = WORDS) -> Path:
    tokenizer_in(folder, words)
    whole = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151936, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engine_selection, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(engine_selection, "vllm_takes_classes", lambda: True)
    monkeypatch.setattr(engine_selection, "quantized", lambda folder, _: folder.with_name(f"{folder.name}-int8"))
    monkeypatch.setattr(engine_selection, "processor", lambda: "a processor avx2")
    machine(monkeypatch, PLAIN, PLAIN_ONE_CORE)
    return model(tmp_path / "target", LARGE), model(tmp_path / "draft", SMALL)


def machine(monkeypatch: pytest.MonkeyPatch, every: Times, one: Times) -> None:
    cores = available_cores()
    shares = {len(share): one for share in share_cores(cores, with_draft=True)} | {len(cores): every}
    times = KernelTimes(seconds={count: dict(found) for count, found in shares.items()}, processor="x", versions={})  # type: ignore[misc]
    monkeypatch.setattr(engine_selection, "kernel_times", lambda _: times)


def engine_setup(pair: tuple[Path, Path], **wanted: Any) -> EngineSetup:
    return select_engines(EngineRequest(**wanted), *pair, LogProgress())


def test_by_itself_it_takes_what_is_fastest_and_says_why(pair: tuple[Path, Path]) -> None:
    found = engine_setup(pair)
    assert found.precision["target"] == "fp32"
    assert found.target_arguments["dtype"] == "float32"
    assert "speculative_config" in found.target_arguments
    assert found.arrangement is not None
    assert found.arrangement.name in found.reason
    assert found.observed is not None


@pytest.mark.parametrize(
    ("instructions", "precision"), [("avx2", "bf16"), ("avx2 avx512_vnni", "int8"), ("i8mm", "int8")]
)
def test_int8_is_taken_by_itself_where_the_processor_multiplies_it(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, instructions: str, precision: str
) -> None:
    machine(monkeypatch, WITH_INT8, WITH_INT8_ONE_CORE)
    monkeypatch.setattr(engine_selection, "processor", lambda: f"a processor {instructions}")
    found = engine_setup(pair)
    assert found.precision["target"] == precision
    assert found.target == (pair[0].with_name("target-int8") if precision == "int8" else pair[0])


def test_int8_weights_are_written_where_they_are_wanted_and_the_processor_has_it(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, WITH_INT8, WITH_INT8_ONE_CORE)
    wanted = {"draft_engine": True, "precision": "int8", "draft_precision": "int8"}
    monkeypatch.setattr(engine_selection, "processor", lambda: "a processor avx2")
    with pytest.raises(ConfigurationError, match="choose the precision int8-weights"):
        engine_setup(pair, **wanted)
    monkeypatch.setattr(engine_selection, "processor", lambda: "a processor avx2 avx512_vnni")
    found = engine_setup(pair, **wanted)
    assert found.target == pair[0].with_name("target-int8")
    assert found.draft == pair[1].with_name("draft-int8")
    assert found.precision == {"target": "int8", "draft": "int8"}
    assert found.target_arguments["dtype"] == "bfloat16"
    assert found.target_arguments["quantization"] == found.draft_arguments["quantization"] == INT8
    speculation_method = engine_setup(pair, precision="int8", draft_precision="int8", token_speculation="draft_model")
    assert speculation_method.target_arguments["speculative_config"]["quantization"] == INT8
    another = engine_setup(pair, precision="int8", token_speculation={"method": "draft_model", "model": "/somebody/s"})
    assert "quantization" not in another.target_arguments["speculative_config"], "not ours, not known"


def test_steps_have_a_draft_engine_and_a_shared_draft(pair: tuple[Path, Path]) -> None:
    found = engine_setup(pair, draft_engine=True)
    assert found.draft is not None
    assert found.speculation_method == "shared_draft"
    assert uses_shared_draft(found.target_arguments["speculative_config"])
    costs = found.target_arguments["additional_config"][COSTS]
    assert costs[1] < costs[128]


@pytest.mark.parametrize(("method", "engine"), [("none", False), ("draft_model", False), ("shared_draft", True)])
def test_a_method_that_is_given_is_taken(pair: tuple[Path, Path], method: str, engine: bool) -> None:
    found = engine_setup(pair, token_speculation=method)
    assert found.speculation_method == method
    assert (found.draft is not None) == engine
    assert ("speculative_config" in found.target_arguments) == (method != "none")


def test_a_precision_that_is_given_is_taken(pair: tuple[Path, Path]) -> None:
    found = engine_setup(pair, precision="bf16", draft_precision="int8-weights", token_speculation="shared_draft")
    assert found.precision == {"target": "bf16", "draft": "int8-weights"}
    assert found.draft == pair[1]
    assert found.draft_arguments["quantization"] == INT8_WEIGHTS
    by_argument = engine_setup(pair, target_arguments={"dtype": "bfloat16"}, token_speculation="none")
    assert by_argument.precision["target"] == "bf16"
    with pytest.raises(ConfigurationError, match="disagree"):
        engine_setup(pair, precision="bf16", target_arguments={"dtype": "float32"})


def test_a_model_that_is_quantized_already_is_left_as_it_is(pair: tuple[Path, Path]) -> None:
    config = json.loads((pair[0] / "config.json").read_text())
    (pair[0] / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    found = engine_setup(pair, token_speculation="none")
    assert found.target == pair[0]
    assert "dtype" not in found.target_arguments


def test_tokens_of_another_vocabulary_cannot_be_guessed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = model(tmp_path / "other", SMALL, ["<eos>", "?", "x", "y"])
    for method in ("shared_draft", "draft_model"):
        with pytest.raises(ConfigurationError, match="another tokenizer"):
            engine_setup((pair[0], other), token_speculation=method)
    assert engine_setup((pair[0], other)).speculation_method == "none"
    steps = engine_setup((pair[0], other), draft_engine=True)
    assert steps.draft == other
    assert steps.speculation_method == "none"
    assert steps.precision["draft"] == "fp32"


def test_without_a_draft_nothing_is_guessed(pair: tuple[Path, Path]) -> None:
    found = select_engines(EngineRequest(), pair[0], None, LogProgress())
    assert found.speculation_method == "none"
    with pytest.raises(ConfigurationError, match="needs a draft model"):
        select_engines(EngineRequest(token_speculation="shared_draft"), pair[0], None, LogProgress())


def test_on_a_gpu_the_folder_says_how_its_weights_are(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_selection, "runs_on_cpu", lambda: False)
    found = engine_setup(pair, draft_engine=True)
    assert found.speculation_method == "shared_draft"
    assert found.precision == {}
    assert "dtype" not in found.target_arguments
    assert engine_setup(pair, precision="int8", token_speculation="none").target == pair[0].with_name("target-int8")


def test_a_draft_whose_target_is_elsewhere_has_its_own_precision(pair: tuple[Path, Path]) -> None:
    found = select_engines(EngineRequest("none", draft_engine=True), None, pair[1], LogProgress())
    assert found.target is None
    assert found.draft == pair[1]
    assert found.draft_arguments["dtype"] == "float32"


def test_vocabularies_are_compared_by_their_files_and_read_only_where_these_differ(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    read: list[Path] = []

    def tokenizer(folder: Path) -> HFTokenizer:
        read.append(folder)
        return HFTokenizer(folder)

    monkeypatch.setattr(engine_selection, "HFTokenizer", tokenizer)
    assert one_vocabulary(target, draft)
    assert not read
    (draft / "tokenizer_config.json").write_text('{"padding_side": "left"}')
    assert one_vocabulary(target, draft), "other settings, but the same tokens"
    assert read == [target, draft]
    assert not one_vocabulary(target, model(tmp_path / "other", SMALL, [*WORDS, "another"]))
