"""Int8 weights and activations (W8A8) on CPUs.

The library's own kernel multiplies the matrices on x86 (`int8_kernel`), and vLLM's with AMX or on ARM (i8mm).
Folders that `models/int8_folder` writes have their weights packed as the kernel reads them, the output layer's too, so
that loading copies them from the mapped file as they are.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import set_weight_attrs

from lookahead_agent.cpu import INT8, LAYOUT
from lookahead_agent.cpu.packing import ROWS, merge, pack, quantize_output_layer, unpack

_CACHED_PRIMITIVES = 32  # capacity of oneDNN's primitive cache, which has an entry for each batch size
_ATTENTION_PARTS = {"q": 0, "k": 1, "v": 2}  # vLLM's names of the parts of a merged layer; other layers number them


Multiply = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Multiplies tokens, shape (tokens, inputs), and adds a bias or None; returns the shape (tokens, outputs)."""
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A layer's product of inputs, shape (…, inputs), and a bias or None."""


def product_by(multiply: Multiply) -> Product:
    """Wrap a kernel as a layer's product, which takes inputs of any shape."""

    def product(inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if inputs.dim() == 2:
            return multiply(inputs, bias)
        out = multiply(inputs.reshape(-1, inputs.shape[-1]), bias)
        return out.reshape(*inputs.shape[:-1], out.shape[-1])

    return product


def int8_product(weights: torch.Tensor, scale: torch.Tensor, out: torch.dtype) -> Product:
    """A layer's product in int8, by our own kernel where it supports the processor, else by vLLM's.

    Weights have the shape (outputs, inputs), or are packed without padding; scales have the shape (outputs,). The sums
    are integers, so a token's outputs do not depend on the rest of the batch.
    """
    # Imported here: at startup vLLM's processes inspect every imported module, and fail on llvmlite's.
    from lookahead_agent.cpu import int8_kernel

    is_packed = weights.dim() > 2
    if int8_kernel.instruction_set() is None:
        return product_by(_onednn_multiplication(unpack(weights) if is_packed else weights, scale, out))
    inputs = weights[0].numel() // ROWS if is_packed else weights.shape[1]
    return product_by(int8_kernel.multiplication(weights if is_packed else pack(weights), scale, inputs, out))


def _onednn_multiplication(weights: torch.Tensor, scale: torch.Tensor, out: torch.dtype) -> Multiply:
    scales = scale.float().reshape(-1, 1).contiguous()  # the kernel copies the weights, but not the scales
    kernel = ops.create_onednn_scaled_mm(weights.t(), scales, out, True, False, _CACHED_PRIMITIVES)

    def multiply(tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        integers, token_scales, _ = ops.onednn_scaled_int8_quant(tokens, None, None, True)
        result = torch.empty((tokens.shape[0], kernel.n), dtype=out)
        ops.onednn_scaled_mm(kernel, integers, result, token_scales, None, None, bias)
        return result

    multiply.scales = scales  # type: ignore[attr-defined]
    return multiply


def _release_free_memory() -> None:
    """Return free memory to the system: vLLM's allocator keeps what loading used."""
    allocator = ctypes.CDLL(None)
    release = getattr(allocator, "MallocExtension_ReleaseFreeMemory", None)  # tcmalloc's
    if release is not None:
        release()
    elif hasattr(allocator, "malloc_trim"):
        allocator.malloc_trim(0)


def _empty(parameter: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.new_empty(0), requires_grad=False)


@register_quantization_config(INT8)
class _Int8Config(CompressedTensorsConfig):  # type: ignore[misc]
    embedding: str | None = None  # format of the embedding's rows; None: those of a tensor

    def get_name(self) -> str:
        return INT8

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "_Int8Config":
        if config.get("layout") != LAYOUT:
            raise ValueError(f"the int8 weights have the layout {config.get('layout')!r} in place of {LAYOUT!r}")
        group = {"group_0": preset_name_to_scheme("W8A8", ["Linear"])}
        scheme = QuantizationConfig(config_groups=group, ignore=["lm_head"], format="int-quantized")
        made: _Int8Config = super().from_config(scheme.model_dump())
        made.embedding = config.get("embedding")
        return made

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, ParallelLMHead):
            return _OutputLayerMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return _GGUFEmbeddingMethod(self.embedding) if self.embedding is not None else None
        method = super().get_quant_method(layer, prefix)
        return _LinearMethod(self) if type(method) is CompressedTensorsLinearMethod else method


class _LinearMethod(CompressedTensorsLinearMethod):  # type: ignore[misc]
    """Merges the packed parts of a layer; vLLM loads weights that are not packed, or divided among processes."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, weight_loader: Any, **kwargs: Any) -> None:
        layer.parts = {}

        def load(parameter: torch.Tensor, loaded: torch.Tensor, part: Any = None) -> None:
            if loaded.dim() > 2:
                layer.parts[part] = loaded
            else:
                self._copy(weight_loader, parameter, loaded, part)

        layer.copy_part = lambda loaded, part: self._copy(weight_loader, layer.weight, unpack(loaded), part)
        super().create_weights(layer, *args, weight_loader=load, **kwargs)

    def _copy(self, weight_loader: Any, parameter: torch.Tensor, loaded: torch.Tensor, part: Any) -> None:
        weight_loader(parameter, loaded, *([] if part is None else [part]))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Multiply by the packed weights if they are all of the layer's, else by those that vLLM loaded."""
        parts = sorted(layer.parts, key=lambda part: _ATTENTION_PARTS.get(part, part)) if layer.parts else []
        packed = [layer.parts[part] for part in parts]
        if sum(part.shape[0] for part in packed) * ROWS == layer.weight.shape[0] and layer.tp_size == 1:
            weights = merge(packed)
        else:
            for part in parts:
                layer.copy_part(layer.parts[part], part)
            weights = layer.weight.data
        dtype = torch.get_default_dtype()  # the activations' dtype while a model loads
        layer.product = int8_product(weights, layer.weight_scale.data.flatten(), dtype)
        layer.weight = _empty(layer.weight)
        del layer.parts, layer.copy_part

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.product(x, bias)


class _OutputLayerMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Multiplies by an output layer's int8 weights: the file's, or quantized here if the file has others.

    compressed-tensors leaves the output layer unquantized: two fifths of the bytes that a pass of the 0.5B draft reads,
    an eighth of the 1.5B target's.
    """

    def create_weights(self, layer: torch.nn.Module, *args: Any, weight_loader: Any, **kwargs: Any) -> None:
        layer.loaded = {}

        def load(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            if parameter is layer.weight_scale or loaded.dim() > 2:
                layer.loaded["scale" if parameter is layer.weight_scale else "weights"] = loaded
            else:
                weight_loader(parameter, loaded)

        super().create_weights(layer, *args, weight_loader=load, **kwargs)
        layer.weight_scale = torch.nn.Parameter(torch.empty(0, dtype=torch.float32), requires_grad=False)
        set_weight_attrs(layer.weight_scale, {"weight_loader": load})

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Multiply by the packed weights, or by a copy that is quantized here; embeddings keep a shared tensor."""
        if layer.loaded:
            weights, scale = layer.loaded["weights"], layer.loaded["scale"]
            if layer.tp_size > 1:
                begin, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
                padding = layer.num_embeddings_per_partition - (end - begin)
                weights = torch.nn.functional.pad(unpack(weights)[begin:end], (0, 0, 0, padding))
                scale = torch.nn.functional.pad(scale[begin:end], (0, padding))
            else:
                weights = merge([weights])
            layer.weight = _empty(layer.weight)
        else:
            weights, scale = quantize_output_layer(layer.weight)
        # Logits in float32: bf16 would round the exact integer sums to eight bits before they are compared.
        layer.product = int8_product(weights, scale, torch.float32)
        del layer.loaded
        _release_free_memory()  # the output layer loads last: the loaded weights of all others are free by now

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.product(x, bias)


class _GGUFEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Dequantizes the rows of the tokens in a pass: the mapped rows take a fifth of the memory of float32."""

    def __init__(self, kind: str) -> None:
        self._kind = kind  # name of the type of GGUF's blocks

    def create_weights(self, layer: torch.nn.Module, *args: Any, weight_loader: Any, **kwargs: Any) -> None:
        def load(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            if layer.tp_size == 1:
                layer.rows = loaded
                layer.weight = _empty(parameter)
            else:
                weight_loader(parameter, self._dequantize(loaded, parameter.dtype))

        super().create_weights(layer, *args, weight_loader=load, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing is left to do: there is no product."""

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens, shape (tokens,)."""
        if layer.tp_size > 1:
            return super().embedding(layer, input_)
        return self._dequantize(layer.rows[input_], layer.weight.dtype)

    def _dequantize(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from gguf import GGMLQuantizationType, dequantize

        exact = dequantize(rows.numpy(), GGMLQuantizationType[self._kind])
        return torch.from_numpy(exact).bfloat16().to(dtype)  # rounded as in the model's bf16 weights
