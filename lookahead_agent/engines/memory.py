"""How much memory there is, and how often the system has killed a process for lack of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
"""Memory that processes share by files, on Linux."""
_SHARED_BYTES = 240 << 20
"""Free bytes without which vLLM makes no queue between its processes, although it uses kilobytes of them."""
_GROUP = Path("/sys/fs/cgroup")
_COUNTERS = (_GROUP / "memory.events", Path("/proc/vmstat"))


def memory() -> tuple[int, int]:
    """Bytes of memory that this process and its children may use in all, and that are free now.

    A container's limit counts where it is lower than the machine's memory; processes beside ours in the container then
    take from what is free.
    """
    machine = psutil.virtual_memory()
    limit = _number(_GROUP / "memory.max") or _number(_GROUP / "memory" / "memory.limit_in_bytes")
    if limit is None or limit >= machine.total:
        return machine.total, machine.available
    used = _number(_GROUP / "memory.current") or _number(_GROUP / "memory" / "memory.usage_in_bytes") or 0
    return limit, max(0, min(machine.available, limit - used))


def kills_for_memory() -> int:
    """How often the system has killed a process for lack of memory, in this container or else on this machine."""
    for file in _COUNTERS:
        try:
            lines = file.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        if counts:
            return counts[0]
    return 0


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there, or "max"
        return None


def no_shared_memory(folder: Path = SHARED) -> str | None:
    """Why vLLM's processes cannot exchange what they have to by shared memory; None: they can, or one cannot tell.

    Args:
        folder: Where the system keeps it.
    """
    if os.uname().sysname != "Linux":
        return None
    advice = "start the container with --shm-size=1g or --ipc=host, or mount a tmpfs there"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return f"there is no {folder}, in which vLLM's processes share memory: {advice}"
    if not os.access(folder, os.W_OK):
        return f"{folder}, in which vLLM's processes share memory, cannot be written: {advice}"
    if free < _SHARED_BYTES:
        return (
            f"{folder}, in which vLLM's processes share memory, has {free >> 20} MiB free, and vLLM asks for "
            f"{_SHARED_BYTES >> 20}: {advice}"
        )
    return None
