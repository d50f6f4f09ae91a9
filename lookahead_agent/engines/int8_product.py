"""Multiplication by a matrix in int8 with activations in int8 too, by vLLM's own kernel for CPUs (oneDNN)."""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops

_BLOCK = 1 << 17
"""Weights that are rounded at a time: few enough to be in a core's cache from one operation to the next."""
_MOST_TOKENS = 32
"""That the kernel is prepared for; it takes more, too."""


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as 8-bit integers, symmetric, one scale for each output.

    Args:
        weight: Shape (outputs, inputs).

    Returns:
        The integers, int8 of the same shape, and the scales, float32 of shape (outputs,).
    """
    exact = weight.detach()
    scale = torch.empty(exact.shape[0], dtype=torch.float32)  # what a model loads with may be bf16
    integers = torch.empty_like(exact, dtype=torch.int8)
    for begin in range(0, exact.shape[0], rows := max(1, _BLOCK // exact.shape[1])):
        part = slice(begin, begin + rows)
        block = exact[part].float()
        scale[part] = (block.abs().amax(dim=1) / 127).clamp_(min=1e-12)
        integers[part] = (block / scale[part, None]).round_().clamp_(-127, 127)
    return integers, scale


class Int8Product:
    """A matrix in int8.

    What is summed are integers, so a token's outputs do not depend on what else is in the batch.

    Args:
        weight: Its weights, shape (outputs, inputs).
        out: Dtype of what comes out.
    """

    def __init__(self, weight: torch.Tensor, out: torch.dtype) -> None:
        integers, self._scale = rounded(weight)  # kept: the kernel copies the integers, but not the scales
        self._out = out
        self._kernel = ops.create_onednn_scaled_mm(integers.t(), self._scale[:, None], out, True, False, _MOST_TOKENS)

    def __call__(self, inputs: torch.Tensor, _: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply: `inputs` has the shape (…, inputs), the result (…, outputs)."""
        integers, scale, _ = ops.onednn_scaled_int8_quant(inputs.reshape(-1, inputs.shape[-1]), None, None, True)
        out = torch.empty((integers.shape[0], self._kernel.n), dtype=self._out)
        ops.onednn_scaled_mm(self._kernel, integers, out, scale, None, None, None)
        if bias is not None:
            out += bias
        return out.reshape(*inputs.shape[:-1], out.shape[-1])
