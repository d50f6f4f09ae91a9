"""Models in W8A8 on CPUs, with their output layer in int8 too.

Their matrices are multiplied as `int8_product` does. compressed-tensors leaves the output layer as it was, which is two
fifths of what a pass of a small draft reads; here it is made integers while the model loads. vLLM knows the method as a
quantization of its own, once this is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from lookahead_agent.cpu.int8_product import Int8Product, rounded
from lookahead_agent.cpu.names import INT8
from lookahead_agent.cpu.output_layer import RoundedOutputLayer


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
            return RoundedOutputLayer(lambda weight: Int8Product(*rounded(weight), weight.dtype, torch.float32))
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
        layer.product = Int8Product(layer.weight.data, layer.weight_scale.data.flatten(), dtype, dtype)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.product(x, None, bias)
