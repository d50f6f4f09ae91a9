"""The GPUs that NVIDIA's driver tells of; no library is loaded for it."""

from __future__ import annotations

from lookahead_agent.hardware.output import output_of


def gpus() -> list[str]:
    """Each GPU's name, memory and driver; none where there is no driver."""
    listed = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return listed.splitlines() if listed else []
