"""Our own values of vLLM's engine argument `quantization`, and the modules that make them known to vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lookahead_agent.cpu.names import INT8, INT8_WEIGHTS

_MODULES: Mapping[str, str] = {
    INT8: "lookahead_agent.cpu.int8_head",
    INT8_WEIGHTS: "lookahead_agent.cpu.int8_weights",
}


def modules_of(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The modules that vLLM's processes must import for an engine's arguments, the draft's in it included."""
    named = (arguments.get("quantization"), (arguments.get("speculative_config") or {}).get("quantization"))
    return (module for name, module in _MODULES.items() if name in named)
