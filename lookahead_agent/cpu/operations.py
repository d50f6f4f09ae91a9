"""vLLM's own operations for CPUs where it leaves them to a compiler, which is off: one call in place of up to nine.

Imported by vLLM's processes when they are sent an engine's configuration.
"""

from __future__ import annotations

import torch
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.platforms import current_platform

from lookahead_agent.cpu.names import PROVIDER

current_platform.import_kernels()


def _same_dtype(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return variance_size is None and (weight is None or weight.dtype == x.dtype)


def _norm_fits(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _same_dtype(x, weight, variance_size)


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_norm_fits)  # type: ignore[untyped-decorator]
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """Norm of each token."""
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def _sum_fits(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _same_dtype(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


@ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_sum_fits, inplace=True)  # type: ignore[untyped-decorator]
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of two, and the norm of each token of it."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _silu_and_mul(_: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    torch.ops._C.silu_and_mul(out, x)
    return out


SiluAndMul.forward_cpu = _silu_and_mul
