"""vLLM's fused CPU operations, used where vLLM relies on a compiler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from lookahead_agent.cpu.operations import OneCallRMSNorm, OneCallSiluAndMul, replace_layers


@pytest.fixture(autouse=True)
def replaced() -> Iterator[None]:
    before = dict(op_registry_oot)
    replace_layers()
    with patch.dict(os.environ), set_current_vllm_config(VllmConfig()):  # vLLM sets variables of its workers
        yield
    op_registry_oot.clear()
    op_registry_oot.update(before)


def norm_of(weight: torch.Tensor, **arguments: Any) -> RMSNorm:
    norm = RMSNorm(len(weight), **arguments).to(weight.dtype)
    norm.weight.data.copy_(weight)
    assert isinstance(norm, OneCallRMSNorm)
    return norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 7, 40])
@torch.inference_mode()
def test_operations_match_vllms_native_implementations(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((tokens, 96), (tokens, 96), (96,)))
    tol: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    norm = norm_of(weight)
    torch.testing.assert_close(norm.forward_cpu(x), norm.forward_native(x), **tol)
    wide = torch.randn(tokens, 200).to(dtype)[:, 64:160]
    torch.testing.assert_close(norm.forward_cpu(wide), norm.forward_native(wide.contiguous()), **tol)
    expected = norm.forward_native(x.clone(), residual.clone())
    for found, sums in zip(norm.forward_cpu(x.clone(), residual.clone()), expected, strict=True):
        torch.testing.assert_close(found, sums, **tol)
    expected = norm.forward_native(wide.contiguous(), residual.clone())
    for found, sums in zip(norm.forward_cpu(wide, residual.clone()), expected, strict=True):
        torch.testing.assert_close(found, sums, **tol)
    activation = SiluAndMul()
    assert isinstance(activation, OneCallSiluAndMul)
    torch.testing.assert_close(activation.forward_cpu(x), SiluAndMul.forward_native(x), **tol)


@torch.inference_mode()
def test_norms_that_the_operation_does_not_have_are_vllms() -> None:
    x = torch.randn(5, 96)
    narrow = norm_of(torch.randn(96), var_hidden_size=32)
    torch.testing.assert_close(narrow.forward_cpu(x), narrow.forward_native(x))
    weightless = norm_of(torch.ones(96), has_weight=False)
    torch.testing.assert_close(weightless.forward_cpu(x), weightless.forward_native(x))


@torch.inference_mode()
def test_norm_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(33, 96).bfloat16(), norm_of(torch.randn(96).bfloat16())
    full = norm.forward_cpu(x)
    assert all(torch.equal(norm.forward_cpu(x[row : row + 1])[0], full[row]) for row in range(33))
