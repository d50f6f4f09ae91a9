"""Our own values of vLLM's engine argument `quantization`, and the modules that make them known to vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

INT8 = "lookahead_int8"
"""W8A8 with the output layer in int8 too, on a CPU: see `int8_head`."""
INT8_WEIGHTS = "lookahead_int8_weights"
"""Weights as integers, activations in floating point, on a CPU: see `int8_weights`."""

_MODULES: Mapping[str, str] = {
    INT8: "lookahead_agent.engines.int8_head",
    INT8_WEIGHTS: "lookahead_agent.engines.int8_weights",
}


def modules_of(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The modules that vLLM's processes must import for an engine's arguments, the draft's in it included."""
    named = (arguments.get("quantization"), (arguments.get("speculative_config") or {}).get("quantization"))
    return (module for name, module in _MODULES.items() if name in named)
