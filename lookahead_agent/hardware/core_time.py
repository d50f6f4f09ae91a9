"""How much of the cores' time went to other programs."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import psutil

from lookahead_agent.cpu.cores import available_cores

logger = logging.getLogger(__name__)

_NOT_WORKED = ("idle", "iowait", "guest", "guest_nice")
"""Fields of a core's times that are no work, or that another field has already counted."""


@dataclass(frozen=True)
class CoreTime:
    """Seconds that cores have worked.

    Attributes:
        every: For all programs, and for other machines on the same processor, on the cores that this process may use.
        own: For this process and those it has started.
        cores: How many cores that is.
        at: When, by a clock that only goes forward.
    """

    every: float
    own: float
    cores: int
    at: float

    @classmethod
    def now(cls) -> CoreTime:
        """As it is now; takes some milliseconds where there are many processes."""
        cores, times = available_cores(), psutil.cpu_times(percpu=True)
        every = sum(_worked(times[core]) for core in cores if core < len(times))
        return cls(every, _own(), len(cores), time.monotonic())

    def others_share(self, since: CoreTime) -> float:
        """Share of the cores' time since then that others had; 0 where the system does not tell.

        Args:
            since: An earlier time.
        """
        passed = (self.at - since.at) * self.cores
        others = (self.every - since.every) - (self.own - since.own)
        return max(0.0, others) / passed if passed > 0 else 0.0


def _worked(times: object) -> float:
    fields: dict[str, float] = times._asdict()  # type: ignore[attr-defined]  # psutil's named tuples differ by system
    return sum(seconds for name, seconds in fields.items() if name not in _NOT_WORKED)


def _own() -> float:
    this, seconds = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            logger.debug("process %d has ended, or may not be seen", process.pid)
            continue
        seconds += times.user + times.system
    return seconds
