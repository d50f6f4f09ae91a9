"""Measured speed of a pair's replies, kept on disk: seconds per token, and how many draft tokens are accepted."""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
from filelock import FileLock

from lookahead_agent.engines.processes import available_cores
from lookahead_agent.hardware.inventory import engine_versions, processor
from lookahead_agent.models.cache import cache_dir, write_whole

logger = logging.getLogger(__name__)

_LATEST = 15  # latest replies that count
_FEWEST = 3  # replies before a configuration's pace counts
_FORM = 10  # increased when the file's content changes its meaning: files of another form are not read
_NOT_WORK = ("idle", "iowait", "guest", "guest_nice")  # of a core's times; a guest's are part of the user's
_ACCEPTANCE = "acceptance rate"  # key of the file beside the names of configurations


class ReplySpeeds:
    """Measured speed of the replies of one pair, named by its models' folders, on one machine."""

    def __init__(self, models: Sequence[str]) -> None:
        known = json.dumps([processor(), len(available_cores()), engine_versions(), list(models), _FORM])
        digest = hashlib.sha256(known.encode()).hexdigest()[:16]
        self._file = cache_dir() / "hardware" / f"speeds-{digest}.json"

    def paces(self) -> dict[str, float]:
        """Seconds per token by `Configuration.name`, of the fastest quarter: other programs may slow replies."""
        return {
            name: sorted(paces)[len(paces) // 4]
            for name, paces in self._read().items()
            if len(paces) >= _FEWEST and name != _ACCEPTANCE
        }

    def acceptance_rate(self) -> float | None:
        """Median share of draft tokens that were accepted; None until one was verified."""
        found = self._read().get(_ACCEPTANCE)
        return statistics.median(found) if found else None

    def add(self, configuration: str, pace: float, acceptance_rate: float | None = None) -> None:
        """Keep the seconds per token of a reply that was alone in its engines, by `Configuration.name`."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._file.with_suffix(".lock")):
                known = self._read()
                for name, value in ((configuration, pace), (_ACCEPTANCE, acceptance_rate)):
                    if value is not None:
                        known[name] = [*known.get(name, []), value][-_LATEST:]
                write_whole(self._file, json.dumps(known, indent=1))
        except OSError as error:  # a reply does not fail because its speed cannot be kept
            logger.info("the speed of a reply cannot be kept: %s", error)

    def _read(self) -> dict[str, list[float]]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): [float(pace) for pace in paces] for name, paces in found.items()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s cannot be read (%s): it is replaced", self._file, error)
            return {}


@dataclass(frozen=True)
class CPUTime:
    """CPU seconds until some moment."""

    total: float  # of all programs on this process's cores
    own: float  # of this process and its children
    at: float  # the moment, by a clock that does not jump

    @classmethod
    def now(cls) -> "CPUTime":
        """Read the counters; takes some milliseconds where there are many processes."""
        this, total, own, cores = psutil.Process(), 0.0, 0.0, available_cores()
        for core, times in enumerate(psutil.cpu_times(percpu=True)):
            if core in cores:
                total += sum(times) - sum(getattr(times, name, 0.0) for name in _NOT_WORK)
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended, or cannot be read
                used = process.cpu_times()
                own += used.user + used.system
        return cls(total, own, time.monotonic())

    def share_of_others(self, before: "CPUTime") -> float:
        """Share of the cores' time since then that other programs used."""
        elapsed = (self.at - before.at) * len(available_cores())
        others = (self.total - before.total) - (self.own - before.own)
        return max(0.0, others) / elapsed if elapsed > 0 else 0.0
