"""Resources of a turn: time, processor time, memory, energy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from lookahead_agent.bench.samples import TurnRecord

logger = logging.getLogger(__name__)

_EVERY = 0.5
_RAPL = Path("/sys/class/powercap")


class TurnMeter:
    """Measures from the begin of its context to the end; `record` has the result.

    Args:
        id: Of the turn.
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
        self._id = id
        self._processes = [psutil.Process(), *processes]
        self._energy = energy or (lambda: None)
        self._gpus = gpus
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="lookahead-turn-meter", daemon=True)
        self._peak = 0
        self._gpu_seconds = 0.0
        self.record: TurnRecord | None = None

    def __enter__(self) -> TurnMeter:
        self._joules = self._energy()
        self._cpu, self._own_cpu = self._cpu_seconds(), time.process_time()
        self._started = time.monotonic()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.monotonic() - self._started
        cpu, own_cpu = self._cpu_seconds() - self._cpu, time.process_time() - self._own_cpu
        joules = self._energy()
        self._ended.set()
        self._watcher.join()
        self.record = TurnRecord(
            id=self._id,
            seconds=seconds,
            cpu_seconds=cpu,
            own_cpu_seconds=own_cpu,
            gpu_seconds=self._gpu_seconds if self._gpus is not None else None,
            peak_memory=self._peak,
            joules=joules - self._joules if joules is not None and self._joules is not None else None,
        )

    def _cpu_seconds(self) -> float:
        return self._over_processes(lambda process: sum(process.cpu_times()[:2]))  # user and system

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            self._peak = max(self._peak, int(self._over_processes(lambda process: process.memory_info().rss)))
            ended = self._ended.wait(_EVERY)
            if self._gpus is not None:
                now = time.monotonic()
                self._gpu_seconds += sum(self._gpus()) * (now - last)
                last = now
            if ended:
                return

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
    cards = _nvml_cards()
    if not zones and not cards:
        return None

    def read() -> float | None:
        parts = [_joules(zone) for zone in zones] + [_card_joules(card) for card in cards]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    return read


def gpu_load() -> Callable[[], list[float]] | None:
    """Reads the load of each NVIDIA GPU, in [0, 1]; None: there are none."""
    cards = _nvml_cards()
    if not cards:
        return None
    import pynvml

    return lambda: [pynvml.nvmlDeviceGetUtilizationRates(card).gpu / 100 for card in cards]


def _joules(zone: Path) -> float | None:
    try:
        return int((zone / "energy_uj").read_text()) / 1e6
    except (OSError, ValueError):  # only root may read it on most machines
        return None


def _nvml_cards() -> list[Any]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        logger.debug("NVML reports nothing: %s", error)
        return []


def _card_joules(card: Any) -> float | None:
    import pynvml

    try:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(card)) / 1000
    except pynvml.NVMLError:
        return None
