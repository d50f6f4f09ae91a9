"""The cores and the memory that this process may use."""

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> list[int]:
    """The CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def memory(group: Path = _CGROUP) -> tuple[int, int]:
    """Bytes of memory that this process and its children may use, and free bytes, both within a container's limit."""
    machine = psutil.virtual_memory()
    limit = _read_integer(group / "memory.max") or _read_integer(group / "memory" / "memory.limit_in_bytes")
    if limit is None or limit >= machine.total:
        return machine.total, machine.available
    used = _read_integer(group / "memory.current") or _read_integer(group / "memory" / "memory.usage_in_bytes") or 0
    return limit, max(0, min(machine.available, limit - used))


def _read_integer(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # missing, or "max"
        return None
