"""Writes the folder of a model's int8 weights that engines on CPUs map: see `cpu/int8`.

Weights are read, quantized and written in parts of a few million, so that gigabytes never lie in memory. This module
runs in the child process of `conversion`.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lookahead_agent.cpu import INT8, LAYOUT
from lookahead_agent.cpu.packing import ROWS, fills_panels, pack, quantize_linear, quantize_output_layer
from lookahead_agent.engines.model_files import read_config
from lookahead_agent.models.cache import GGUF, weight_names

_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PART = 1 << 22  # weights of a part
_ALIGNMENT = 8  # bytes: of the largest dtype
# Layers whose vLLM classes take packed weights.
_PACKED = re.compile(r".*\.(?:self_attn|mlp)\.(?:q|k|v|qkv|o|gate|up|gate_up|down)_proj\.weight")
_NAMES = {torch.int8: "I8", torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the model that is converted."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[slice], torch.Tensor]  # the rows of a slice
    rows: torch.Tensor | None = None  # its quantized rows, shape (rows, bytes), if it is from a GGUF file
    kind: str | None = None  # format of these rows


@dataclass
class _File:
    """A safetensors file whose tensors are written in parts, in any order."""

    path: Path
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    _offsets: dict[str, int] = field(default_factory=dict)

    def open(self) -> None:
        """Write the header, once all tensors are known."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in self.tensors.items():
            begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            self._offsets[name] = begin
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._begin = 8 + len(text)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.truncate(self._descriptor, self._begin + end)
        self._write_bytes(len(text).to_bytes(8, "little") + text, 0)

    def write(self, name: str, first_row: int, rows: torch.Tensor) -> None:
        """Write consecutive rows of a tensor."""
        shape, dtype = self.tensors[name][1], self.tensors[name][0]
        row_size = dtype.itemsize * torch.Size(shape[1:]).numel()
        content = rows.to(dtype).contiguous().view(-1).view(torch.uint8).numpy()
        self._write_bytes(memoryview(content), self._begin + self._offsets[name] + first_row * row_size)

    def _write_bytes(self, content: bytes | memoryview, offset: int) -> None:
        while content:
            written = os.pwrite(self._descriptor, content, offset)
            content, offset = content[written:], offset + written

    def close(self) -> None:
        os.close(self._descriptor)


def write_int8_folder(source: Path, folder: Path, load: Callable[[Path], Any]) -> None:
    """Write a model's configuration and packed int8 weights, from safetensors or a GGUF file.

    `load` returns the whole model, for GGUF files whose tensors transformers converts in other ways than one by one.
    """
    config = read_config(source)
    model = _empty_model(source)
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    linear -= {_OUTPUT}
    if (source / GGUF).is_file():
        tensors = _gguf_tensors(source, model) or {
            name: _in_memory(tensor) for name, tensor in load(source).state_dict().items()
        }
        config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    else:
        tensors = _safetensors(source)
    quantization: dict[str, Any] = {"quant_method": INT8, "layout": LAYOUT}
    if _EMBEDDING in tensors and (_OUTPUT in tensors or config.get("tie_word_embeddings")):
        # The embedding keeps its precision, so the output layer is another tensor.
        tensors.setdefault(_OUTPUT, tensors[_EMBEDDING])
        config["tie_word_embeddings"] = False
        if (kind := tensors[_EMBEDDING].kind) is not None:
            quantization["embedding"] = kind
    elif _EMBEDDING in tensors:
        tensors[_EMBEDDING] = replace(tensors[_EMBEDDING], rows=None)
    if not linear & tensors.keys():
        raise ValueError(f"none of the weights in {source} is a linear layer's")
    _write(folder / "model.safetensors", tensors, linear)
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _empty_model(source: Path) -> Any:
    """The model without weights, which knows its layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _safetensors(source: Path) -> dict[str, SourceTensor]:
    from safetensors import safe_open

    found = {}
    for file in weight_names(source):
        opened: Any = safe_open(source / file, framework="pt")
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_tensor(name)  # mapped
            found[name] = _in_memory(tensor)
    return found


def _in_memory(tensor: torch.Tensor) -> SourceTensor:
    rows = tensor if tensor.dim() else tensor[None]
    return SourceTensor(tuple(tensor.shape), tensor.dtype, rows.__getitem__)


def _gguf_tensors(source: Path, model: Any) -> dict[str, SourceTensor]:
    """The tensors of a GGUF file by the names of transformers, in bf16; none if they are not converted one by one."""
    from transformers import modeling_gguf_pytorch_utils as gguf_in_transformers

    from lookahead_agent.models.gguf_file import read_gguf

    values, tensors = read_gguf(source / GGUF)
    kind = gguf_in_transformers.TENSOR_PROCESSORS.get(
        values["general.architecture"], gguf_in_transformers.TensorProcessor
    )
    llama = gguf_in_transformers.LlamaTensorProcessor
    if kind not in (gguf_in_transformers.TensorProcessor, llama):
        return {}
    processor = kind(config=model.config.to_dict())
    names = gguf_in_transformers.get_gguf_hf_weights_map(model, processor)
    found = {}
    for tensor in tensors:
        if (name := names.get(tensor.name)) is None:
            continue
        if kind is llama and (".attn_q." in tensor.name or ".attn_k." in tensor.name):
            read = partial(_read_reordered, tensor, processor, names)
        else:
            read = partial(_read_rows, tensor)
        rows = torch.from_numpy(tensor.blocks) if name == _EMBEDDING else None
        is_quantized = tensor.kind.name not in ("F32", "F16", "BF16")
        found[name] = SourceTensor(
            tensor.shape,
            torch.bfloat16,
            read,
            rows if is_quantized else None,
            tensor.kind.name if is_quantized else None,
        )
    return found


def _read_rows(tensor: Any, rows: slice) -> torch.Tensor:
    from gguf import dequantize

    blocks, rows = (tensor.blocks[rows], slice(None)) if tensor.blocks.ndim > 1 else (tensor.blocks, rows)
    return torch.from_numpy(dequantize(blocks, tensor.kind))[rows].bfloat16()


def _read_reordered(tensor: Any, processor: Any, names: Mapping[str, str], rows: slice) -> torch.Tensor:
    """Read rows whose order llama.cpp has changed."""
    from gguf import dequantize

    whole = dequantize(tensor.blocks, tensor.kind)
    ordered = processor.process(weights=whole, name=tensor.name, tensor_key_mapping=names, parsed_parameters={})
    return torch.from_numpy(ordered.weights[rows].copy()).bfloat16()


WriteJob = tuple[int, Callable[[], None]]
"""A number of weights, and the function that converts them."""


def _write(path: Path, tensors: Mapping[str, SourceTensor], linear: set[str]) -> None:
    """Write all tensors in parts, on as many threads as there are cores, and print the progress."""
    file = _File(path)
    jobs: list[WriteJob] = []
    for name, tensor in tensors.items():
        jobs += _jobs(file, name, tensor, is_linear=name in linear)
    # The largest dtypes come first, as in safetensors' own files, so that each tensor is aligned.
    file.tensors = dict(sorted(file.tensors.items(), key=lambda entry: -entry[1][0].itemsize))
    file.open()
    torch.set_num_threads(1)
    total, done = sum(size for size, _ in jobs), 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sizes = {pool.submit(convert): size for size, convert in jobs}
        try:
            for future in as_completed(sizes):
                future.result()
                done += sizes[future]
                sys.stderr.write(f"{100 * done // total}%|\n")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    file.close()


def _is_packed(dtype: torch.dtype, shape: Sequence[int]) -> bool:
    return dtype == torch.int8 and len(shape) > 2


def _jobs(file: _File, name: str, tensor: SourceTensor, *, is_linear: bool) -> Sequence[WriteJob]:
    """Name a tensor's results in the file, and return the jobs that write them."""
    rows = tensor.shape[0] if tensor.shape else 1
    columns = torch.Size(tensor.shape[1:]).numel()
    packs = len(tensor.shape) == 2 and fills_panels(*tensor.shape)
    scale = name.removesuffix("weight") + "weight_scale"
    panels = (rows // ROWS, columns // 4, ROWS, 4)
    if name == _OUTPUT and packs:
        file.tensors |= {name: (torch.int8, panels), scale: (torch.float32, (rows,))}
    elif is_linear:
        is_packed = packs and _PACKED.fullmatch(name) is not None
        file.tensors |= {
            name: (torch.int8, panels if is_packed else tensor.shape),
            scale: (tensor.dtype, (rows, 1)),
        }
    elif tensor.rows is not None:
        file.tensors[name] = (torch.uint8, tuple(tensor.rows.shape))
    else:
        file.tensors[name] = (tensor.dtype, tensor.shape)

    def convert(begin: int) -> None:
        part = slice(begin, begin + step)
        if name == _OUTPUT and packs:
            integers, scales = quantize_output_layer(tensor.read(part))
        elif is_linear:
            integers, scales = quantize_linear(tensor.read(part))
        else:
            file.write(name, begin, tensor.rows[part] if tensor.rows is not None else tensor.read(part))
            return
        is_packed = _is_packed(*file.tensors[name])
        file.write(name, begin // ROWS if is_packed else begin, pack(integers) if is_packed else integers)
        file.write(scale, begin, scales)

    step = max(ROWS, _PART // max(columns, 1) // ROWS * ROWS)
    return [(min(step, rows - begin) * columns, partial(convert, begin)) for begin in range(0, rows, step)]
