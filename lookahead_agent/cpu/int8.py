"""Int8 weights and activations (W8A8) on CPUs.

The library's own kernel multiplies the matrices on x86 (`int8_kernel`), and vLLM's with AMX or on ARM (i8mm).
compressed-tensors leaves the output layer unquantized: two fifths of the bytes that a pass of the 0.5B draft reads, an
eighth of the 1.5B target's. Here it is quantized while the model loads.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from lookahead_agent.cpu import INT8

_CACHED_PRIMITIVES = 32  # capacity of oneDNN's primitive cache, which has an entry for each batch size
_BLOCK = 1 << 17  # weights that are quantized at a time: few enough to stay in a core's cache


Multiply = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Multiplies tokens, shape (tokens, inputs), and adds a bias or None; returns the shape (tokens, outputs)."""
Product = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""A layer's product with vLLM's arguments: inputs, shape (…, inputs), unused weights, and a bias or None."""


def product_by(multiply: Multiply) -> Product:
    """Wrap a kernel as a layer's product, which takes vLLM's arguments."""

    def product(inputs: torch.Tensor, _: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        out = multiply(inputs.reshape(-1, inputs.shape[-1]), bias)
        return out.reshape(*inputs.shape[:-1], out.shape[-1])

    return product


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights, shape (outputs, inputs), to symmetric int8, with float32 scales of shape (outputs,)."""
    exact = weight.detach()
    scale = torch.empty(exact.shape[0], dtype=torch.float32)  # the default dtype may be bf16 while a model loads
    integers = torch.empty_like(exact, dtype=torch.int8)
    for begin in range(0, exact.shape[0], rows := max(1, _BLOCK // exact.shape[1])):
        part = slice(begin, begin + rows)
        block = exact[part].float()
        scale[part] = (block.abs().amax(dim=1) / 127).clamp_(min=1e-12)
        integers[part] = (block / scale[part, None]).round_().clamp_(-127, 127)
    return integers, scale


class RoundedOutputLayer(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Multiplies by an output layer's quantized weights; embeddings that share its weights keep them as loaded."""

    def __init__(self, quantized_product: Callable[[torch.Tensor], Product]) -> None:
        self._quantized_product = quantized_product

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize the weights; the loaded tensor stays for the embeddings."""
        layer.cpu_linear = self._quantized_product(layer.weight)
        _release_free_memory()  # the output layer loads last: the loaded weights of all others are free by now


def _release_free_memory() -> None:
    """Return free memory to the system: vLLM's allocator keeps several times the size of the int8 weights."""
    allocator = ctypes.CDLL(None)
    release = getattr(allocator, "MallocExtension_ReleaseFreeMemory", None)  # tcmalloc's
    if release is not None:
        release()
    elif hasattr(allocator, "malloc_trim"):
        allocator.malloc_trim(0)


def int8_product(integers: torch.Tensor, scale: torch.Tensor, out: torch.dtype) -> Product:
    """A layer's product in int8, by our own kernel where it supports the processor, else by vLLM's.

    Weights have the shape (outputs, inputs), scales (outputs,). The sums are integers, so a token's outputs do not
    depend on the rest of the batch.
    """
    # Imported here: at startup vLLM's processes inspect every imported module, and fail on llvmlite's.
    from lookahead_agent.cpu import int8_kernel

    if int8_kernel.instruction_set() is None:
        return product_by(_onednn_multiplication(integers, scale, out))
    return product_by(int8_kernel.multiplication(int8_kernel.pack(integers), scale, integers.shape[1], out))


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


@register_quantization_config(INT8)
class _Int8Config(CompressedTensorsConfig):  # type: ignore[misc]
    def get_name(self) -> str:
        return INT8

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, **_: Any) -> str | None:
        """Claim a compressed-tensors folder if the engine's arguments name this quantization."""
        return INT8 if user_quant == INT8 and hf_quant_cfg.get("quant_method") == "compressed-tensors" else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, ParallelLMHead):
            # Logits in float32: bf16 would round the exact integer sums to eight bits before they are compared.
            return RoundedOutputLayer(lambda weight: int8_product(*rounded(weight), torch.float32))
        method = super().get_quant_method(layer, prefix)
        return _LinearMethod(self) if type(method) is CompressedTensorsLinearMethod and _is_plain(layer) else method


def _is_plain(layer: torch.nn.Module) -> bool:
    """Whether a layer has the scheme of our converted folders: scales per output, symmetric dynamic ones per token."""
    scheme = layer.scheme
    return (
        isinstance(scheme, CompressedTensorsW8A8Int8)
        and scheme.strategy == QuantizationStrategy.CHANNEL
        and scheme.input_symmetric
        and not scheme.is_static_input_scheme
    )


class _LinearMethod(CompressedTensorsLinearMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        dtype = torch.get_default_dtype()  # the activations' dtype while a model loads
        layer.product = int8_product(layer.weight.data, layer.weight_scale.data.flatten(), dtype)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.product(x, None, bias)
