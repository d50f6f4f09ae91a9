"""Resources of a turn: time, processor time, memory, energy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lookahead_agent.bench.samples import TurnRecord

_EVERY = 0.5
_RAPL = Path("/sys/class/powercap")


class TurnMeter:
    """Measures from the begin of its context to the end; `record` has the result.

    Args:
        processes: The engines'; this process is counted too.
        energy: Reads the energy used so far, in joules; None: unknown.
        gpus: Reads the load of each GPU, in [0, 1]; None: there are none.
    """

    def __init__(
        self,
        id: str,
        processes: Sequence[psutil.Process],
        energy: Callable[[], float | None] | None = None,
        gpus: Callable[[], list[float]] | None = None,
    ) -> None:
        self._processes = [psutil.Process(), *processes]
        self._energy = energy or (lambda: None)
        self._gpus = gpus
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="lookahead-turn-meter", daemon=True)
        self.record = TurnRecord(id=id, seconds=0.0, gpu_seconds=None if gpus is None else 0.0, peak_memory=0)

    def __enter__(self) -> TurnMeter:
        self._before = self._read()
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._read()
        self._ended.set()
        self._watcher.join()
        for name, value in after.items():
            before = self._before[name]
            setattr(self.record, name, None if value is None or before is None else value - before)

    def _read(self) -> dict[str, float | None]:
        return {
            "joules": self._energy(),
            "cpu_seconds": self._over_processes(lambda process: sum(process.cpu_times()[:2])),  # user and system
            "own_cpu_seconds": time.process_time(),
            "seconds": time.monotonic(),
        }

    def _watch(self) -> None:
        last = time.monotonic()
        ended = False
        while not ended:
            memory = int(self._over_processes(lambda process: process.memory_info().rss))
            self.record.peak_memory = max(self.record.peak_memory or 0, memory)
            ended = self._ended.wait(_EVERY)
            if self._gpus is not None:
                now = time.monotonic()
                self.record.gpu_seconds = (self.record.gpu_seconds or 0.0) + sum(self._gpus()) * (now - last)
                last = now

    def _over_processes(self, figure: Callable[[psutil.Process], float]) -> float:
        total = 0.0
        for process in self._processes:
            with suppress(psutil.Error):  # it has ended, and its time with it
                total += figure(process)
        return total


def energy_counter(root: Path = _RAPL) -> Callable[[], float | None] | None:
    """Reads the energy used by processors (RAPL) and NVIDIA GPUs (NVML), in joules; None: neither reports it."""
    packages = [zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1]
    zones = [zone for zone in packages if _joules(zone) is not None]
    nvml, cards = _nvml()
    if not zones and not cards:
        return None

    def of_card(card: Any) -> float | None:
        with suppress(nvml.NVMLError):
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(card)) / 1000
        return None

    def read() -> float | None:
        parts = [_joules(zone) for zone in zones] + [of_card(card) for card in cards]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    return read


def gpu_load() -> Callable[[], list[float]] | None:
    """Reads the load of each NVIDIA GPU, in [0, 1]; None: there are none."""
    nvml, cards = _nvml()
    return (lambda: [nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100 for card in cards]) if cards else None


def _joules(zone: Path) -> float | None:
    with suppress(OSError, ValueError):  # only root may read it on most machines
        return int((zone / "energy_uj").read_text()) / 1e6
    return None


def _nvml() -> tuple[Any, list[Any]]:
    """NVIDIA's management library, if it is there, and the GPUs."""
    try:
        import pynvml
    except ImportError:
        return None, []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return pynvml, []
