"""Layers whose weights are rounded while a model loads and multiplied by a kernel of our own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

_BLOCK = 1 << 17
"""Weights that are rounded at a time: few enough to be in a core's cache from one operation to the next."""


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
    """How the output layer is kept, by the product that `rounded` makes of weights, shape (outputs, inputs).

    Embeddings that are the same weights stay as they are.
    """

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
