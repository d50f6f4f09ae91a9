"""Weights as 8-bit integers with activations in floating point, for CPUs without instructions for int8 arithmetic.

There a pass of a few tokens takes as long as reading the weights does, and vLLM's kernels for int8 are emulated. So
weights are kept as integers (symmetric, one scale for each output channel) and multiplied by a kernel of our own
(`int8_kernel`). They are made integers while the model loads, from whatever its folder has. Measured with AVX2: a token
takes 133 ms, in bf16 270 ms.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from lookahead_agent.cpu import INT8_WEIGHTS
from lookahead_agent.cpu.matrix import Product, RoundedOutputLayer, product_by, rounded


def _kernel() -> ModuleType:
    # Not above: vLLM's processes begin by looking into every module that is there, and stumble over llvmlite's.
    from lookahead_agent.cpu import int8_kernel

    return int8_kernel


def int8_weights_product(weight: torch.Tensor) -> Product:
    """A layer's product by its weights, shape (outputs, inputs), as integers."""
    kernel = _kernel()
    integers, scale = rounded(weight)
    packed = kernel.packed(integers)

    def multiply(tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = kernel.multiply(tokens.float(), packed, scale)
        if bias is not None:
            out += bias
        return out.to(tokens.dtype)

    return product_by(multiply)


class _LinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = int8_weights_product(layer.weight)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


@register_quantization_config(INT8_WEIGHTS)
class Int8WeightsConfig(QuantizationConfig):  # type: ignore[misc]
    """The method, as vLLM asks for it."""

    def get_name(self) -> str:
        """An engine's `quantization`."""
        return INT8_WEIGHTS

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of an engine's activations."""
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of a GPU: it is for CPUs."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: nothing of it is in the model's folder."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8WeightsConfig:
        """It has no settings."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """How a layer's weights are kept."""
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if layer.input_size % _kernel().LANES else _LinearMethod()
        return RoundedOutputLayer(int8_weights_product) if isinstance(layer, ParallelLMHead) else None
