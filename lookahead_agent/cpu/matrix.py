"""A matrix of a layer that is multiplied by a kernel of our own, and what vLLM's compiler is shown of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from typing import Any, cast
from weakref import WeakValueDictionary

import torch

_NUMBERS = count()


class Matrix(ABC):
    """Multiplies tokens by its weights.

    Args:
        outputs: How many it has.
        out: Dtype of what comes out; None: that of what is multiplied.
    """

    def __init__(self, outputs: int, out: torch.dtype | None = None) -> None:
        self.outputs, self.out = outputs, out
        self._number = next(_NUMBERS)
        _NUMBERED[self._number] = self

    def __call__(self, inputs: torch.Tensor, _: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply: `inputs` has the shape (…, inputs), the result (…, outputs)."""
        if torch.compiler.is_compiling():  # it sees into no kernel, and an operation of PyTorch's takes longer to call
            return cast("torch.Tensor", _as_operation(inputs, bias, self._number))
        return self.now(inputs, bias)

    def now(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The same where nothing is compiled."""
        out = self.multiplied(inputs.reshape(-1, inputs.shape[-1]), bias)
        return out.reshape(*inputs.shape[:-1], out.shape[-1])

    @abstractmethod
    def multiplied(self, tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply `tokens` of the shape (tokens, inputs); the result has (tokens, outputs)."""


_NUMBERED: WeakValueDictionary[int, Matrix] = WeakValueDictionary()
"""By the number that stands for a matrix in what is compiled."""


def _numbered(x: torch.Tensor, bias: torch.Tensor | None, n: int) -> torch.Tensor:
    return _NUMBERED[n].now(x, bias)


def _shaped(x: torch.Tensor, bias: torch.Tensor | None, n: int) -> torch.Tensor:
    matrix = _NUMBERED[n]
    return x.new_empty((*x.shape[:-1], matrix.outputs), dtype=matrix.out or x.dtype)


_as_operation: Any = torch.library.custom_op(
    "lookahead::multiply", _numbered, mutates_args=(), schema="(Tensor x, Tensor? bias, int n) -> Tensor"
)
_as_operation.register_fake(_shaped)
