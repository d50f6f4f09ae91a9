"""Weights as 8-bit integers with activations in floating point, for CPUs without instructions for int8 arithmetic.

There a pass of a few tokens takes as long as reading the weights does, and vLLM's kernels for int8 are emulated. So
weights are kept as integers (symmetric, one scale for each output channel), which PyTorch's kernel for int8 weights
reads for a few tokens at a time; for prompts, where arithmetic is what counts, weights are made float32 again for the
moment, some thousands at a time. They are made integers while the model loads, from whatever its folder has.

vLLM knows the method as a quantization of its own, once this module is imported, which its processes do when they are
sent the engine's configuration.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from lookahead_agent.engines.vllm_engine import INT8_WEIGHTS

FEW = 4
"""Tokens that PyTorch's kernel is given at once: it shares the reading of weights among so many (measured)."""
MANY = 28
"""Tokens of a pass from which making the weights float32 takes less time than it saves (measured)."""
_BLOCK = 3 << 18
"""Weights that are float32 at a time: few enough to be in a processor's cache when they are multiplied (measured)."""


class Int8Matrix:
    """A matrix of a layer.

    Args:
        weight: Its weights, shape (outputs, inputs).
    """

    def __init__(self, weight: torch.Tensor) -> None:
        exact = weight.detach().float()
        # PyTorch's kernel takes scales in bfloat16; rounded before the weights are, they cost no precision twice.
        scale = (exact.abs().amax(dim=1) / 127).clamp(min=1e-12).bfloat16()
        self.integers = (exact / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.scale = scale

    def __call__(self, inputs: torch.Tensor, _: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply: `inputs` has the shape (…, inputs), the result (…, outputs)."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        if flat.shape[0] < MANY:
            few = flat.bfloat16().split(FEW)
            out = torch.cat([torch._weight_int8pack_mm(tokens, self.integers, self.scale) for tokens in few])
        else:
            out = self._many(flat.float())
        out = out.to(inputs.dtype)
        if bias is not None:
            out += bias
        return out.reshape(*inputs.shape[:-1], out.shape[-1])

    def _many(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs, inputs = self.integers.shape
        rows = max(1, _BLOCK // inputs)
        block = tokens.new_empty(min(rows, outputs), inputs)
        out = tokens.new_empty(tokens.shape[0], outputs)
        for begin in range(0, outputs, rows):
            integers = self.integers[begin : begin + rows]
            weights = block[: integers.shape[0]].copy_(integers)
            out[:, begin : begin + rows] = tokens @ weights.t()
        return out.mul_(self.scale.float())


class _LinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = Int8Matrix(layer.weight)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


class _EmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = Int8Matrix(layer.weight)
        _give_memory_back()  # the output layer comes last: what all others were loaded into is free by now


def _give_memory_back() -> None:
    """Return what is free to the system: vLLM's allocator keeps it, several times the size of the integers."""
    allocator = ctypes.CDLL(None)
    release = getattr(allocator, "MallocExtension_ReleaseFreeMemory", None)  # tcmalloc's
    if release is not None:
        release()
    elif hasattr(allocator, "malloc_trim"):
        allocator.malloc_trim(0)


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
            return _LinearMethod()
        return _EmbeddingMethod() if isinstance(layer, ParallelLMHead) else None
