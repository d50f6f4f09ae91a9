"""Costs of a model's forward passes on a CPU: a table by instruction set, so that nothing is measured at start.

Nearly all of a pass on a CPU is multiplication by weights. Its cost by precision and batch size differs between
processors by factors: without instructions for bf16 or int8, vLLM's kernels for them gain nothing from a batch.
The figures are medians of two-core machines of each kind; only their ratios matter for a choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lookahead_agent.engines.pass_costs import cost_at
from lookahead_agent.hardware.inventory import processor

Kernel = Literal["bf16", "fp32", "int8", "int8-weights"]
"""Precision of weights, and of activations too but for "int8-weights", where they are in floating point."""
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
INT8_INSTRUCTIONS = ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")

_SIZES = (1, 4, 8, 16, 128)
"""Tokens in a pass."""
# Microseconds for a million weights, by number of tokens: on all cores, and on a share while other cores read memory.
_WITH_INT8: Mapping[Kernel, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "bf16": ((79, 70, 82, 106, 593), (231, 169, 191, 200, 1192)),
    "fp32": ((157, 136, 154, 195, 1208), (271, 185, 260, 366, 2352)),
    "int8": ((32, 29, 30, 43, 299), (43, 41, 50, 84, 597)),
    "int8-weights": ((30, 85, 129, 210, 1564), (40, 163, 253, 429, 2861)),
}
_WITHOUT_INT8: Mapping[Kernel, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "bf16": ((108, 398, 807, 1625, 12681), (217, 808, 1571, 3096, 25304)),
    "fp32": ((177, 209, 251, 336, 1866), (275, 417, 506, 683, 4224)),
    "int8": ((994, 1883, 1847, 1775, 2647), (906, 2047, 2066, 2103, 2939)),
    "int8-weights": ((45, 77, 137, 256, 1997), (81, 149, 276, 531, 4115)),
}
# A layer costs this beside its matrices: attention, norms, and vLLM's launches of single operations.
_SECONDS_PER_LAYER, _SECONDS_PER_TOKEN_AND_LAYER = 0.3e-3, 0.05e-3


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that decide the cost of a pass.

    Attributes:
        layers: Number of layers.
        weights: Weights of all matrices, the output layer's included, in millions.
        head: Those of the output layer.
    """

    layers: int
    weights: float
    head: float

    @classmethod
    def of(cls, folder: Path) -> ModelSize | None:
        """The size of the dense model in a folder; None for other architectures."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("num_experts") or config.get("num_local_experts"):
            return None
        try:
            hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
            head_size = config.get("head_dim") or hidden // heads
            attention = hidden * head_size * 2 * (heads + config.get("num_key_value_heads", heads))
            layer = attention + 3 * hidden * config["intermediate_size"]
            head = hidden * config["vocab_size"] / 1e6
            return cls(layers, layers * layer / 1e6 + head, head)
        except KeyError:
            return None


def multiplies_int8(instructions: str | None = None) -> bool:
    """Whether a processor has instructions for int8 arithmetic.

    Args:
        instructions: Its CPU flags, separated by spaces; None: this machine's.
    """
    return not set((processor() if instructions is None else instructions).split()).isdisjoint(INT8_INSTRUCTIONS)


class KernelCosts:
    """Costs of forward passes on processors with some instruction set.

    Args:
        with_int8: Whether they multiply int8.
    """

    def __init__(self, *, with_int8: bool) -> None:
        self._table = _WITH_INT8 if with_int8 else _WITHOUT_INT8
        self.fastest_float: Kernel = "bf16" if with_int8 else "fp32"
        """The faster of bf16 and fp32 where much is read and little written."""

    def seconds(self, model: ModelSize, kernel: Kernel, tokens: int, *, share: bool = False) -> float:
        """Expected seconds of a pass.

        Args:
            model: The model's size.
            kernel: Precision of its weights.
            tokens: In the pass.
            share: Whether it runs on a share of the cores, beside another model.
        """
        per_million = dict(zip(_SIZES, self._table[kernel][share], strict=True))
        per_layer = _SECONDS_PER_LAYER + tokens * _SECONDS_PER_TOKEN_AND_LAYER
        return model.weights * cost_at(per_million, tokens) * 1e-6 + model.layers * per_layer

    def seconds_per_prompt_token(self, model: ModelSize, kernel: Kernel) -> float:
        """Expected seconds of each token of a long prompt; the output layer reads only the last."""
        return self._table[kernel][False][-1] * 1e-6 * (model.weights - model.head) / _SIZES[-1]

    def by_size(self, model: ModelSize, kernel: Kernel) -> dict[int, float]:
        """Expected seconds of passes on a share of the cores, by number of tokens."""
        return {tokens: self.seconds(model, kernel, tokens, share=True) for tokens in _SIZES}
