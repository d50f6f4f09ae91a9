"""Weights in int8 on CPUs, with activations in int8 too (W8A8), or in floating point.

Matrices are multiplied by our own kernel where the processor is one for it (`vnni_kernel`), else by vLLM's: for the few
tokens of a pass vLLM's takes a fifth longer. compressed-tensors leaves the output layer as it was, two fifths of what a
pass of the 0.5B draft reads and an eighth of the 1.5B target's; here it is made integers while the model loads.

Without instructions for int8 arithmetic vLLM's kernels for int8 are emulated. There all weights are made integers while
the model loads, and multiplied by a kernel of our own (`int8_kernel`). With AVX2 a token takes 133 ms, in bf16 270 ms.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Self

import torch
from compressed_tensors.quantization import QuantizationStrategy
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from lookahead_agent.cpu import INT8, INT8_WEIGHTS

_MOST_TOKENS = 32  # that the kernel is prepared for; it takes more, too
_BLOCK = 1 << 17  # weights that are rounded at a time: few enough to stay in a core's cache from step to step


Multiply = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Takes tokens, shape (tokens, inputs), and a bias or none; gives the shape (tokens, outputs)."""
Product = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""As vLLM calls a layer's own: inputs, shape (…, inputs), weights that are not needed, and a bias."""


def product_by(multiply: Multiply) -> Product:
    """A layer's product by a kernel."""

    def product(inputs: torch.Tensor, _: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        out = multiply(inputs.reshape(-1, inputs.shape[-1]), bias)
        return out.reshape(*inputs.shape[:-1], out.shape[-1])

    return product


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, shape (outputs, inputs), as symmetric 8-bit integers, with float32 scales of shape (outputs,)."""
    exact = weight.detach()
    scale = torch.empty(exact.shape[0], dtype=torch.float32)  # what a model loads with may be bf16
    integers = torch.empty_like(exact, dtype=torch.int8)
    for begin in range(0, exact.shape[0], rows := max(1, _BLOCK // exact.shape[1])):
        part = slice(begin, begin + rows)
        block = exact[part].float()
        scale[part] = (block.abs().amax(dim=1) / 127).clamp_(min=1e-12)
        integers[part] = (block / scale[part, None]).round_().clamp_(-127, 127)
    return integers, scale


class RoundedOutputLayer(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """How the output layer is kept, by the product that `rounded` makes of it; embeddings of the same weights stay."""

    def __init__(self, rounded: Callable[[torch.Tensor], Product]) -> None:
        self._rounded = rounded

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Round them; what was loaded stays for the embeddings."""
        layer.cpu_linear = self._rounded(layer.weight)
        _give_memory_back()  # the output layer comes last: what all others were loaded into is free by now


def _give_memory_back() -> None:
    """Return what is free to the system: vLLM's allocator keeps it, several times the size of the integers."""
    allocator = ctypes.CDLL(None)
    release = getattr(allocator, "MallocExtension_ReleaseFreeMemory", None)  # tcmalloc's
    if release is not None:
        release()
    elif hasattr(allocator, "malloc_trim"):
        allocator.malloc_trim(0)


def int8_product(integers: torch.Tensor, scale: torch.Tensor, activations: torch.dtype, out: torch.dtype) -> Product:
    """A layer's product in int8, by our own kernel where the processor is one for it, else by vLLM's.

    Weights have the shape (outputs, inputs), scales (outputs,). Integers are summed, so a token's outputs do not
    depend on what else is in the batch.
    """
    # Not above: vLLM's processes begin by looking into every module that is there, and stumble over llvmlite's.
    from lookahead_agent.cpu import vnni_kernel

    outputs, inputs = integers.shape
    own = vnni_kernel.is_supported() and vnni_kernel.fits(outputs, inputs, activations, out)
    return product_by((vnni_kernel.multiplication if own else _by_vllm)(integers, scale, out))


def _by_vllm(weights: torch.Tensor, scale: torch.Tensor, out: torch.dtype) -> Multiply:
    kept = scale.float().reshape(-1, 1).contiguous()  # the kernel copies the integers, but not the scales
    kernel = ops.create_onednn_scaled_mm(weights.t(), kept, out, True, False, _MOST_TOKENS)

    def multiply(tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        integers, token_scales, _ = ops.onednn_scaled_int8_quant(tokens, None, None, True)
        result = torch.empty((tokens.shape[0], kernel.n), dtype=out)
        ops.onednn_scaled_mm(kernel, integers, result, token_scales, None, None, bias)
        return result

    multiply.kept = kept  # type: ignore[attr-defined]
    return multiply


@register_quantization_config(INT8)
class _Int8Config(CompressedTensorsConfig):  # type: ignore[misc]
    def get_name(self) -> str:
        return INT8

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, **_: Any) -> str | None:
        """Read a folder in compressed-tensors where an engine is told to; no other."""
        return INT8 if user_quant == INT8 and hf_quant_cfg.get("quant_method") == "compressed-tensors" else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, ParallelLMHead):
            # In float32: what int8 has summed exactly is not to be rounded to bf16's eight bits before it is compared.
            return RoundedOutputLayer(lambda weight: int8_product(*rounded(weight), weight.dtype, torch.float32))
        method = super().get_quant_method(layer, prefix)
        return _LinearMethod(self) if type(method) is CompressedTensorsLinearMethod and _is_plain(layer) else method


def _is_plain(layer: torch.nn.Module) -> bool:
    """Whether a layer has what our own files have: a scale for each output, and for each token when it comes."""
    scheme = layer.scheme
    return (
        isinstance(scheme, CompressedTensorsW8A8Int8)
        and scheme.strategy == QuantizationStrategy.CHANNEL
        and scheme.input_symmetric
        and not scheme.is_static_input_scheme
    )


class _LinearMethod(CompressedTensorsLinearMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        dtype = torch.get_default_dtype()  # of activations, while a model loads
        layer.product = int8_product(layer.weight.data, layer.weight_scale.data.flatten(), dtype, dtype)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.product(x, None, bias)


def int8_weights_product(weight: torch.Tensor) -> Product:
    """A layer's product by its weights, shape (outputs, inputs), as integers."""
    from lookahead_agent.cpu import int8_kernel

    integers, scale = rounded(weight)
    packed = int8_kernel.packed(integers)

    def multiply(tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = int8_kernel.multiply(tokens.float(), packed, scale)
        if bias is not None:
            out += bias
        return out.to(tokens.dtype)

    return product_by(multiply)


class _WeightsMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = int8_weights_product(layer.weight)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


@register_quantization_config(INT8_WEIGHTS)
class _Int8WeightsConfig(QuantizationConfig):  # type: ignore[misc]
    def get_name(self) -> str:
        return INT8_WEIGHTS

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # of a GPU: it is for CPUs

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # nothing of it is in the model's folder

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from lookahead_agent.cpu.int8_kernel import LANES

        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if layer.input_size % LANES else _WeightsMethod()
        return RoundedOutputLayer(int8_weights_product) if isinstance(layer, ParallelLMHead) else None
