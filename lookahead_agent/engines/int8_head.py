"""Models in W8A8 whose output layer is int8 too, on CPUs.

compressed-tensors leaves the output layer as it was, which is two fifths of what a pass of a small draft reads. Here it
is made integers while the model loads. vLLM knows the method as a quantization of its own, once this is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from lookahead_agent.engines.int8_product import Int8Product
from lookahead_agent.engines.output_layer import RoundedOutputLayer
from lookahead_agent.engines.quantizations import INT8


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
            return RoundedOutputLayer(lambda weight: Int8Product(weight, torch.float32))
        return super().get_quant_method(layer, prefix)
