"""Int8 folders that engines on CPUs map: from GGUF files, equal to those from bf16, and never misread."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from lookahead_agent.cpu import INT8, LAYOUT
from lookahead_agent.cpu.packing import fills_panels, merge, pack, quantize_linear, quantize_output_layer, unpack
from lookahead_agent.models.cache import GGUF, damage
from lookahead_agent.models.conversion import damage_to
from lookahead_agent.models.gguf_file import read_gguf
from lookahead_agent.models.int8_folder import write_int8_folder

HIDDEN, INNER, VOCABULARY = 64, 96, 160
LAYER = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "attn_q": (64, HIDDEN),
    "attn_k": (16, HIDDEN),  # too few rows for a panel
    "attn_v": (16, HIDDEN),
    "attn_output": (HIDDEN, 64),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def write_gguf(folder: Path, architecture: str, *, is_tied: bool) -> None:
    """Write a model of random weights in blocks, with an array as long as a vocabulary, and its configuration."""
    folder.mkdir()
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=is_tied,
    )
    config.save_pretrained(folder)
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {} if is_tied else {"output": (VOCABULARY, HIDDEN)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}
    biases = {"attn_q": 64, "attn_k": 16, "attn_v": 16} if architecture == "qwen2" else {}
    writer = gguf.GGUFWriter(folder / GGUF, architecture)
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(VOCABULARY)])
    writer.add_array("tokenizer.ggml.token_type", [1] * VOCABULARY)
    for name, value in (("attention.head_count", 4), ("attention.head_count_kv", 1), ("block_count", 2)):
        writer.add_uint32(f"{architecture}.{name}", value)
    random = np.random.default_rng(0)
    kinds = [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q5_0]
    for name, size in biases.items():
        for layer in range(2):
            writer.add_tensor(f"blk.{layer}.{name}.bias", random.standard_normal(size, dtype=np.float32))
    for number, (name, shape) in enumerate(shapes.items()):
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = kinds[number % len(kinds)]
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(source: Path) -> Any:
    """The model of a folder in bf16, as transformers reads GGUF files."""
    config = AutoConfig.from_pretrained(source)
    return AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, config=config, dtype=torch.bfloat16)


def fail(source: Path) -> Any:
    raise AssertionError(f"{source} is converted tensor by tensor")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(("architecture", "is_tied"), [("qwen2", False), ("llama", True)])
def test_folder_from_gguf_equals_the_one_from_bf16(architecture: str, is_tied: bool, tmp_path: Path) -> None:
    source, bf16, direct, by_way = (tmp_path / name for name in ("source", "bf16", "direct", "by-way"))
    write_gguf(source, architecture, is_tied=is_tied)
    for folder in (bf16, direct, by_way):
        folder.mkdir()
    model = load(source)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    model.config.quantization_config = None
    del model.config.quantization_config, model.hf_quantizer
    model.save_pretrained(bf16)
    write_int8_folder(source, direct, fail)
    write_int8_folder(bf16, by_way, fail)
    found, expected = weights_of(direct), weights_of(by_way)
    assert found.keys() == expected.keys()
    config = json.loads((direct / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": INT8, "layout": LAYOUT, "embedding": "Q8_0"}
    assert not config["tie_word_embeddings"]
    assert config["dtype"] == "bfloat16"
    embedding = found.pop("model.embed_tokens.weight")
    exact = gguf.dequantize(embedding.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(torch.from_numpy(exact).bfloat16(), state["model.embed_tokens.weight"])
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    quantized = quantize_linear(state["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(unpack(found["model.layers.1.mlp.down_proj.weight"]), quantized[0])
    assert torch.equal(found["model.layers.1.mlp.down_proj.weight_scale"], quantized[1])
    integers, scale = quantize_output_layer(state["lm_head.weight"])
    assert torch.equal(unpack(found["lm_head.weight"]), integers)
    assert torch.equal(found["lm_head.weight_scale"], scale)
    assert found["model.layers.0.self_attn.k_proj.weight"].shape == (16, HIDDEN)  # packed when it loads
    gate_up = [found[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(merge(gate_up), torch.cat(gate_up))
    assert merge(gate_up).data_ptr() % mmap.PAGESIZE == 0, "the kernel reads whole cache lines"


def test_other_architectures_are_loaded_as_a_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_gguf(source, "qwen2", is_tied=False)
    model = load(source)
    content = (source / GGUF).read_bytes()
    (source / GGUF).write_bytes(content.replace(struct.pack("<Q", 5) + b"qwen2", struct.pack("<Q", 5) + b"bloom"))
    write_int8_folder(source, tmp_path, lambda _: model)
    assert weights_of(tmp_path)["model.layers.0.mlp.down_proj.weight"].dtype == torch.int8


def test_linear_layers_are_quantized_as_by_compressed_tensors() -> None:
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = preset_name_to_scheme("W8A8", ["Linear"]).weights
    assert arguments is not None
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(700, 250, generator=torch.Generator().manual_seed(1)).to(dtype)
        weight[3] = 0
        scale, zero_point = calculate_qparams(*weight.float().aminmax(dim=1, keepdim=True), arguments)
        scale = scale.to(dtype)
        expected = quantize(weight, scale, zero_point.to(torch.int8), arguments, dtype=torch.int8)
        integers, found = quantize_linear(weight)
        assert torch.equal(found, scale)
        assert torch.equal(integers, expected)


@given(st.integers(1, 100), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_unpack_undoes_pack(rows: int, columns: int) -> None:
    integers = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    unpacked = unpack(pack(integers))
    assert torch.equal(unpacked[:rows, :columns], integers)
    assert fills_panels(rows, columns) == (unpacked.shape == integers.shape)


def test_damaged_gguf_files_raise_an_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", "qwen2", is_tied=False)
    file = tmp_path / "model" / GGUF
    values, tensors = read_gguf(file)
    assert values["qwen2.block_count"] == 2
    assert values["tokenizer.ggml.tokens"] is None
    assert {tensor.name: tensor.shape for tensor in tensors}["blk.1.attn_k.weight"] == LAYER["attn_k"]
    content = file.read_bytes()
    damages = [content[:length] for length in (0, 3, 23, 200, len(content) // 2, len(content) - 40)]
    damages += [b"GGUF" + struct.pack("<I", 9) + content[8:], content[:8] + b"\xff" * 16 + content[24:]]
    for damaged in damages:
        file.write_bytes(damaged)
        with pytest.raises((ValueError, KeyError, struct.error)):
            read_gguf(file)


def change_layout(config: dict[str, Any]) -> None:
    config["quantization_config"]["layout"] = "panels of 16 rows"


def write_old_config(config: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize("change", [change_layout, write_old_config])
def test_folder_of_another_layout_is_made_anew(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    write_gguf(tmp_path / "source", "qwen2", is_tied=False)
    folder = tmp_path / "int8"
    folder.mkdir()
    write_int8_folder(tmp_path / "source", folder, fail)
    assert damage_to(folder, "int8") is None
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    assert damage(folder, weights="wanted") is None
    assert "another layout" in (damage_to(folder, "int8") or "")
    assert damage_to(folder, "w8a8") is None


def test_model_without_linear_layers_raises_an_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "source", "qwen2", is_tied=False)
    content = (tmp_path / "source" / GGUF).read_bytes()
    (tmp_path / "source" / GGUF).write_bytes(content.replace(b"blk.", b"odd."))
    with pytest.raises(ValueError, match="linear"):
        write_int8_folder(tmp_path / "source", tmp_path, fail)
