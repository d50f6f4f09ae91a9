"""Weights in every precision, on real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.errors import ConversionError
from lookahead_agent.machine.choice import Precision
from lookahead_agent.models.quantize import quantized
from lookahead_agent.progress import LogProgress
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import questions

ASKED = questions(12, seed=31)
ENGINE = {name: value for name, value in TINY_ENGINE.items() if name != "dtype"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    return tmp_path


def test_int8_weights_are_written_once(cache: Path, tiny_pair: tuple[Path, Path]) -> None:
    folder = quantized(tiny_pair[0], LogProgress())
    written = (folder / "model.safetensors").stat().st_mtime_ns
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    assert "lm_head" in config["ignore"]
    assert quantized(tiny_pair[0], LogProgress()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert quantized(folder, LogProgress()) == folder, "what is quantized is left as it is"
    broken = cache / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(ConversionError, match="writing broken as int8 failed"):
        quantized(broken, LogProgress())
    assert not list(cache.glob("models/broken*unfinished*"))


def test_a_matrix_of_int8_weights_is_the_same_for_few_tokens_and_for_many() -> None:
    import torch

    from lookahead_agent.engines.int8_weights import MANY, Int8Matrix

    torch.manual_seed(0)
    weight, inputs, bias = torch.randn(96, 64), torch.randn(MANY, 64), torch.randn(96)
    matrix = Int8Matrix(weight)
    exact = inputs @ weight.T + bias
    many = matrix(inputs, None, bias)
    few = torch.cat([matrix(row[None], None, bias) for row in inputs])
    assert many.dtype == few.dtype == torch.float32
    spread = exact.std()
    assert (many - exact).abs().max() < 0.05 * spread, "eight bits are this close"
    assert (few - many).abs().max() < 0.05 * spread, "and few tokens are as close as bf16 is"
    assert torch.equal(matrix(inputs[:9], None, bias), few[:9]), "a batch changes nothing below that"
    assert matrix(inputs[None, :2], None, None).shape == (1, 2, 96)


# The draft's alone, too: vLLM's processes then know the method by nothing that they are sent but its name.
@pytest.mark.parametrize("precision", ["int8-weights", "fp32"])
def test_an_engine_keeps_its_weights_as_integers(tiny_pair: tuple[Path, Path], precision: Precision) -> None:
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        policy="off",
        precision=precision,
        draft_precision="int8-weights",
        token_speculation="draft_model",
        temperature=0,
        max_tokens=24,
        engine_args=ENGINE,
    ) as llm:
        message = llm.invoke(ASKED[0])
        assert message.text
        figures = message.response_metadata["lookahead"]
        assert figures["mode"] == "sd"
        assert figures["engines"]["precision"] == {"target": precision, "draft": "int8-weights"}
        assert precision in llm.explain()
