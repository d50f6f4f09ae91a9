"""Multiplication by a matrix in int8 with activations in int8 too: by our kernel where it is faster, else by vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from vllm import _custom_ops as ops

from lookahead_agent.cpu.matrix import Matrix

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


class Int8Product(Matrix):
    """A matrix in int8, multiplied by our own kernel where the processor is one for it (`vnni_kernel`).

    What is summed are integers, so a token's outputs do not depend on what else is in the batch.

    Args:
        integers: Its weights, int8, shape (outputs, inputs).
        scale: Of each output: float32, shape (outputs,).
        activations: Dtype of what is multiplied.
        out: Dtype of what comes out.
    """

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor, activations: torch.dtype, out: torch.dtype) -> None:
        super().__init__(integers.shape[0], out)
        kernel = _kernel()
        self._multiply: Multiply
        if kernel is not None and kernel.fits(*integers.shape, activations, out):
            self._multiply = kernel.multiplication(integers, scale, out)
        else:
            self._multiply = _by_vllm(integers, scale, out)

    def multiplied(self, tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply `tokens` of the shape (tokens, inputs); the result has (tokens, outputs)."""
        return self._multiply(tokens, bias)


Multiply = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Takes tokens, shape (tokens, inputs), and a bias or none; gives the shape (tokens, outputs)."""


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
