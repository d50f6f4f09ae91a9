"""vLLM's fused CPU operations, used where vLLM relies on a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import ir

from lookahead_agent.cpu import operations as cpu_operations


def _call(operation: Any, *arguments: Any) -> Any:
    return operation.impl_fn(*arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_operations_match_vllms_native_implementations(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x, residual, weight = torch.randn(tokens, 96), torch.randn(tokens, 96), torch.randn(96)
    inputs = [each.to(dtype) for each in (x, residual, weight)]
    tol: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}

    def native(name: str, *arguments: Any) -> Any:
        return getattr(ir.ops, name).impls["native"].impl_fn(*arguments, 1e-6)

    normed = _call(cpu_operations.rms_norm, inputs[0], inputs[2], 1e-6)
    torch.testing.assert_close(normed, native("rms_norm", inputs[0], inputs[2]), **tol)
    native_fused = native("fused_add_rms_norm", *inputs)
    fused = _call(cpu_operations.fused_add_rms_norm, inputs[0].clone(), inputs[1].clone(), inputs[2], 1e-6)
    for found, expected in zip(fused, native_fused, strict=True):
        torch.testing.assert_close(found, expected, **tol)
    gated = cpu_operations.OneCallSiluAndMul.forward_cpu(None, inputs[0])
    torch.testing.assert_close(gated, cpu_operations.SiluAndMul.forward_native(inputs[0]), **tol)


def test_rms_norm_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(33, 96).bfloat16(), torch.randn(96).bfloat16()
    full = _call(cpu_operations.rms_norm, x, weight, 1e-6)
    assert all(
        torch.equal(_call(cpu_operations.rms_norm, x[row : row + 1], weight, 1e-6)[0], full[row]) for row in range(33)
    )
