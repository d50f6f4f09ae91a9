"""vLLM's operations in place of those that a compiler would put together."""

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
def test_they_compute_what_vllm_does_without_them(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x, residual, weight = torch.randn(tokens, 96), torch.randn(tokens, 96), torch.randn(96)
    given = [each.to(dtype) for each in (x, residual, weight)]
    near: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}

    def native(name: str, *arguments: Any) -> Any:
        return getattr(ir.ops, name).impls["native"].impl_fn(*arguments, 1e-6)

    alone = _call(cpu_operations.rms_norm, given[0], given[2], 1e-6)
    torch.testing.assert_close(alone, native("rms_norm", given[0], given[2]), **near)
    wanted = native("fused_add_rms_norm", *given)
    both = _call(cpu_operations.fused_add_rms_norm, given[0].clone(), given[1].clone(), given[2], 1e-6)
    for found, expected in zip(both, wanted, strict=True):
        torch.testing.assert_close(found, expected, **near)
    gated = cpu_operations.OneCallSiluAndMul.forward_cpu(None, given[0])
    torch.testing.assert_close(gated, cpu_operations.SiluAndMul.forward_native(given[0]), **near)


def test_a_batch_changes_nothing() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(33, 96).bfloat16(), torch.randn(96).bfloat16()
    many = _call(cpu_operations.rms_norm, x, weight, 1e-6)
    assert all(
        torch.equal(_call(cpu_operations.rms_norm, x[row : row + 1], weight, 1e-6)[0], many[row]) for row in range(33)
    )
