"""The measured speed of a pair's replies, kept on disk: seconds per token, and the draft tokens' acceptance rate."""

import hashlib
import json
import logging
import math
import os
import stat
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
from filelock import FileLock
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from lookahead_agent.system.files import cache_dir, write_atomically
from lookahead_agent.system.inventory import engine_versions, processor
from lookahead_agent.system.machine import available_cores

logger = logging.getLogger(__name__)

_WINDOW = 15  # latest replies that count
_MIN_REPLIES = 3  # replies before a configuration's pace counts
_FILE_VERSION = 10  # increased when the content changes its meaning: files of another version are not read
_EXCLUDED_TIMES = ("idle", "iowait", "guest", "guest_nice")  # of a core's times; guest times are part of the user's
_MAX_BYTES = 1 << 18  # of a file; a full one has some thousand
_LOCK_SECONDS = 0.5  # until a speed is dropped, because another process holds the file's lock
_REPORTED: set[Path] = set()  # damaged files that a warning has named
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
            with FileLock(self._file.with_suffix(".lock"), timeout=_LOCK_SECONDS, mode=0o600):
                recorded = self._read()
                for name, value in ((configuration, pace), (_ACCEPTANCE, acceptance_rate)):
                    if value is not None and _is_valid(name, value):
                        recorded[name] = [*recorded.get(name, []), value][-_WINDOW:]
                if self._file.exists() and not self._file.is_file() and not self._file.is_dir():
                    self._file.unlink()  # writing to a pipe would wait for a reader
                write_atomically(self._file, json.dumps(recorded, indent=1))
            _REPORTED.discard(self._file)
        except OSError as error:  # a reply does not fail because its speed cannot be recorded, nor wait for a lock
            logger.info("the speed of a reply cannot be kept: %s", error)

    def _read(self) -> dict[str, list[float]]:
        """Read the file; a damaged one is reported once and counts as empty."""
        try:
            return _CONTENT.validate_json(_read_regular(self._file))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            if self._file not in _REPORTED:
                _REPORTED.add(self._file)
                reason = "it is damaged" if isinstance(error, ValidationError) else error
                logger.warning("%s cannot be read (%s): no speed is known", self._file, reason)
            return {}


def _is_valid(name: str, value: float) -> bool:
    """Whether a value can be a pace in seconds, or an acceptance rate: below 1, of which a pass has endless tokens."""
    return 0 <= value < 1 if name == _ACCEPTANCE else 0 < value < math.inf


def _check_values(content: dict[str, list[float]]) -> dict[str, list[float]]:
    if not all(_is_valid(name, value) for name, values in content.items() for value in values):
        raise ValueError("a pace or an acceptance rate is impossible")
    return content


_CONTENT = TypeAdapter(Annotated[dict[str, list[float]], AfterValidator(_check_values)], config=ConfigDict(strict=True))


def _read_regular(file: Path) -> bytes:
    """Read a small regular file; raises OSError for anything else, which may have no end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise OSError("it is no small regular file")
        return opened.read(_MAX_BYTES)


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
