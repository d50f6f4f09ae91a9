"""Why an engine's processes have ended, as far as can be told from outside, and how much memory there is."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

ADVICE = (
    "lower kv_cache_memory_bytes, max_model_len or max_num_seqs in engine_args (gpu_memory_utilization on a GPU), take "
    "precision int8-weights or a smaller model, or end what else runs"
)

_AT_START = re.compile(r"Failed core proc\(s\):.*(?<!\d)-9\b")
SHARED = Path("/dev/shm")
"""Memory that processes share by files, on Linux."""
_SHARED_BYTES = 240 << 20  # free, or vLLM makes no queue between its processes, although it uses kilobytes of them
_GROUP = Path("/sys/fs/cgroup")


def explain(processes: Sequence[BaseProcess], patience: float = 2.0) -> str:
    """Why an engine of these processes of vLLM's does not work any more; blocks for seconds of `patience` for each."""
    for process in processes:
        process.join(patience)
    codes = [process.exitcode for process in processes]
    signals = [signal.Signals(-code).name for code in codes if code is not None and code < 0]
    if "SIGKILL" in signals:
        return _killed()
    if "SIGBUS" in signals:
        return f"its process found {SHARED} full (SIGBUS): make it larger (--shm-size=1g for a container)"
    if signals:
        return f"its process was ended by {signals[0]}"
    return (
        "its worker failed, or was killed, as systems do that run out of memory; the log says which "
        f"(VLLM_LOGGING_LEVEL=INFO). If it was memory ({_free()}): {ADVICE}"
    )


def explain_start(error: Exception) -> str:
    """The same of an engine that did not start."""
    if _AT_START.search(str(error)):
        return _killed()
    if (problem := no_shared_memory()) is not None:
        return problem
    lines = [line.strip() for line in str(error).splitlines() if "errors.pydantic.dev" not in line]
    reason = list(filter(None, lines)) or [type(error).__name__]
    return f"{reason[-1]} (VLLM_LOGGING_LEVEL=INFO shows its log; if it was memory, {ADVICE})"


def _killed() -> str:
    return f"its process was killed, as systems do that run out of memory ({_free()}): {ADVICE}"


def _free() -> str:
    total, free = memory()
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free now"


def memory(group: Path = _GROUP) -> tuple[int, int]:
    """Bytes of memory that this process and its children may use in all, by a container's limit too, and free ones."""
    machine = psutil.virtual_memory()
    limit = _number(group / "memory.max") or _number(group / "memory" / "memory.limit_in_bytes")
    if limit is None or limit >= machine.total:
        return machine.total, machine.available
    used = _number(group / "memory.current") or _number(group / "memory" / "memory.usage_in_bytes") or 0
    return limit, max(0, min(machine.available, limit - used))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there, or "max"
        return None


def no_shared_memory(folder: Path = SHARED) -> str | None:
    """Why vLLM's processes cannot exchange what they have to by shared memory; None: they can, or one cannot tell."""
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
