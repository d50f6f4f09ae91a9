"""A model's output layer with weights that are rounded while the model loads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


class RoundedOutputLayer(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """How the output layer is kept; embeddings that are the same weights stay as they are.

    Args:
        rounded: Makes of weights, shape (outputs, inputs), what multiplies by them: called with inputs, weights and
            bias, as vLLM calls its own.
    """

    def __init__(self, rounded: Callable[[torch.Tensor], Callable[..., torch.Tensor]]) -> None:
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
