"""Names under which vLLM and its processes know what this package adds; importing them loads nothing else."""

from __future__ import annotations

ENTRY_POINT = "lookahead_cpu"
"""Of the plugin, in the group `vllm.general_plugins`."""
VARIABLE = "LOOKAHEAD_AGENT_CPU_PLUGIN"
"""Environment variable without which the plugin does nothing: "1" in the processes of this library's engines."""
INT8 = "lookahead_int8"
"""W8A8 with the output layer in int8 too: see `int8`."""
INT8_WEIGHTS = "lookahead_int8_weights"
"""Weights as integers, activations in floating point: see `int8_weights`."""
PROVIDER = "lookahead_cpu"
"""Provider of the operations in `operations`, for vLLM's `ir_op_priority`."""
