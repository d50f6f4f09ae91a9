"""The measured speed of a pair's replies, kept on disk: seconds per token, and the draft tokens' acceptance rate."""

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
from lookahead_agent.models.cache import cache_dir, write_atomically

logger = logging.getLogger(__name__)

_WINDOW = 15  # latest replies that count
_MIN_REPLIES = 3  # replies before a configuration's pace counts
_FILE_VERSION = 10  # increased when the content changes its meaning: files of another version are not read
_EXCLUDED_TIMES = ("idle", "iowait", "guest", "guest_nice")  # of a core's times; guest times are part of the user's
_ACCEPTANCE = "acceptance rate"  # key in the file, beside the names of configurations


class ReplySpeeds:
    """The measured speed of one pair's replies on one machine; `models` are the models' folders."""

    def __init__(self, models: Sequence[str]) -> None:
        identity = json.dumps([processor(), len(available_cores()), engine_versions(), list(models), _FILE_VERSION])
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._file = cache_dir() / "hardware" / f"speeds-{digest}.json"

    def paces(self) -> dict[str, float]:
        """Seconds per token by `Configuration.name`, as the lower quartile: other programs may slow replies."""
        return {
            name: sorted(paces)[len(paces) // 4]
            for name, paces in self._read().items()
            if len(paces) >= _MIN_REPLIES and name != _ACCEPTANCE
        }

    def acceptance_rate(self) -> float | None:
        """The median share of accepted draft tokens; None before one is recorded."""
        rates = self._read().get(_ACCEPTANCE)
        return statistics.median(rates) if rates else None

    def add(self, configuration: str, pace: float, acceptance_rate: float | None = None) -> None:
        """Record the seconds per token of a reply that ran alone in its engines, by `Configuration.name`."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._file.with_suffix(".lock")):
                recorded = self._read()
                for name, value in ((configuration, pace), (_ACCEPTANCE, acceptance_rate)):
                    if value is not None:
                        recorded[name] = [*recorded.get(name, []), value][-_WINDOW:]
                write_atomically(self._file, json.dumps(recorded, indent=1))
        except OSError as error:  # a reply does not fail because its speed cannot be recorded
            logger.info("the speed of a reply cannot be kept: %s", error)

    def _read(self) -> dict[str, list[float]]:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): [float(value) for value in values] for name, values in content.items()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s cannot be read (%s): it is replaced", self._file, error)
            return {}


@dataclass(frozen=True)
class CPUTime:
    """CPU seconds used until a moment."""

    total: float  # by all programs on this process's cores
    own: float  # by this process and its children
    at: float  # the moment, on the monotonic clock

    @classmethod
    def now(cls) -> "CPUTime":
        """Read the counters, which takes some milliseconds if there are many processes."""
        this, total, own, cores = psutil.Process(), 0.0, 0.0, available_cores()
        for core, times in enumerate(psutil.cpu_times(percpu=True)):
            if core in cores:
                total += sum(times) - sum(getattr(times, name, 0.0) for name in _EXCLUDED_TIMES)
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.Error):  # the process has ended, or cannot be read
                used = process.cpu_times()
                own += used.user + used.system
        return cls(total, own, time.monotonic())

    def share_of_others(self, before: "CPUTime") -> float:
        """The share of the cores' time since `before` that other programs used."""
        elapsed = (self.at - before.at) * len(available_cores())
        others = (self.total - before.total) - (self.own - before.own)
        return max(0.0, others) / elapsed if elapsed > 0 else 0.0
