"""vLLM's fused CPU operations, where vLLM relies on a compiler that is disabled: one call in place of up to nine.

Measured on two cores: a forward pass of the 1.5B target takes 52 to 66 ms with them, 66 to 76 ms without.
"""

import torch
from vllm import ir
from vllm.kernels import vllm_c
from vllm.model_executor.layers.activation import SiluAndMul

from lookahead_agent.cpu import PROVIDER


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=vllm_c.rms_no_var_size)  # type: ignore[untyped-decorator]
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """Normalize each token with the operation that vLLM selects on GPUs only."""
    norm: torch.Tensor = vllm_c.rms_norm.impl_fn(x.contiguous(), weight, epsilon)
    return norm


def _supports_add(x, x_residual, weight, epsilon, variance_size=None):  # type: ignore[no-untyped-def]
    is_supported = vllm_c.rms_add_no_var_size(x, x_residual, weight, epsilon, variance_size)
    return is_supported and x.is_contiguous() and x_residual.is_contiguous()


_register = ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_supports_add, inplace=True)
fused_add_rms_norm = _register(vllm_c.fused_add_rms_norm.impl_fn)


class OneCallSiluAndMul(SiluAndMul):  # type: ignore[misc]
    """The gated activation of a layer as one call."""

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """Call vLLM's fused operation."""
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
        torch.ops._C.silu_and_mul(out, x)
        return out


def replace_activation() -> None:
    """Register `OneCallSiluAndMul` in place of vLLM's `SiluAndMul` in this process."""
    SiluAndMul.register_oot(OneCallSiluAndMul, name=SiluAndMul.__name__)
