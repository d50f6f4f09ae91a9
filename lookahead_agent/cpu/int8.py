"""Models in W8A8 on CPUs, with their output layer in int8 too.

Matrices are multiplied by our own kernel where the processor is one for it (`vnni_kernel`), else by vLLM's: for the few
tokens of a pass vLLM's takes a fifth longer. compressed-tensors leaves the output layer as it was, two fifths of what a
pass of the 0.5B draft reads and an eighth of the 1.5B target's; here it is made integers while the model loads.
"""

from __future__ import annotations

from types import ModuleType
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
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from lookahead_agent.cpu import INT8
from lookahead_agent.cpu.matrix import Multiply, Product, RoundedOutputLayer, product_by, rounded

_MOST_TOKENS = 32
"""That the kernel is prepared for; it takes more, too."""


def int8_product(integers: torch.Tensor, scale: torch.Tensor, activations: torch.dtype, out: torch.dtype) -> Product:
    """A layer's product in int8, by our own kernel where the processor is one for it (`vnni_kernel`).

    What is summed are integers, so a token's outputs do not depend on what else is in the batch.

    Args:
        integers: Its weights, int8, shape (outputs, inputs).
        scale: Of each output: float32, shape (outputs,).
        activations: Dtype of what is multiplied.
        out: Dtype of what comes out.
    """
    kernel = _kernel()
    if kernel is not None and kernel.fits(*integers.shape, activations, out):
        return product_by(kernel.multiplication(integers, scale, out))
    return product_by(_by_vllm(integers, scale, out))


def _kernel() -> ModuleType | None:
    # Not above: vLLM's processes begin by looking into every module that is there, and stumble over llvmlite's.
    from lookahead_agent.cpu import vnni_kernel

    return vnni_kernel if vnni_kernel.is_supported() else None


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
class Int8Config(CompressedTensorsConfig):  # type: ignore[misc]
    """The method, as vLLM asks for it."""

    def get_name(self) -> str:
        """An engine's `quantization`."""
        return INT8

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, **_: Any) -> str | None:
        """Read a folder in compressed-tensors where an engine is told to; no other."""
        return INT8 if user_quant == INT8 and hf_quant_cfg.get("quant_method") == "compressed-tensors" else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """How a layer's weights are kept."""
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
