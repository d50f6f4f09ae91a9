"""The record of measured replies on disk: seconds per token and acceptance rates by configuration, mode, load and node.

Each pair of models and machine has a file. Processes that write it take turns, and a damaged one is replaced.
"""

import hashlib
import json
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import psutil
from filelock import FileLock
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from lookahead_agent.modes.table import Mode
from lookahead_agent.system.files import cache_dir, write_atomically
from lookahead_agent.system.inventory import engine_versions, processor
from lookahead_agent.system.machine import available_cores

logger = logging.getLogger(__name__)

Load = Literal["alone", "beside others"]
Quantity = Literal["writing", "prefill", "acceptance"]
"""Seconds for each token of a reply after its first; seconds until its first token, for each prompt token without a
prefix cache hit; the acceptance rate of draft tokens."""

WINDOW = 15  # latest replies that count
_MAX_NAMES = 300  # characters of a series in JSON: a server's clients choose the names of nodes
_FILE_VERSION = 11  # increased when the content changes its meaning: files of another version are not read
_EXCLUDED_TIMES = ("idle", "iowait", "guest", "guest_nice")  # times of a core; guest times are part of the user's
_MAX_BYTES = 1 << 19  # bytes of a file; one of the most series and the longest names has half of them
_LOCK_SECONDS = 0.5  # seconds until a measurement is dropped, because another process holds the file's lock
_REPORTED: set[Path] = set()  # damaged files that a warning has named


class Series(NamedTuple):
    """What a list of measured values belongs to."""

    configuration: str  # name of the engines' configuration, see `Configuration.name`
    mode: Mode
    load: Load = "alone"
    node: str = ""  # empty for the replies of all nodes
    quantity: Quantity = "writing"


Measurements = dict[Series, list[float]]
"""The latest values of each series, and the latest series last."""


class PaceRecord:
    """The measured replies of a pair on one machine; `models` are their folders, and what else determines a speed."""

    def __init__(self, models: Sequence[str]) -> None:
        identity = json.dumps([processor(), len(available_cores()), engine_versions(), list(models), _FILE_VERSION])
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._file = cache_dir() / "hardware" / f"paces-{digest}.json"

    def update(self, change: Callable[[Measurements], None]) -> None:
        """Read the measurements, change them, and write them; without the lock or the file, nothing is kept."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._file.with_suffix(".lock"), timeout=_LOCK_SECONDS, mode=0o600):
                measurements = self.read()
                change(measurements)
                if self._file.exists() and not self._file.is_file() and not self._file.is_dir():
                    self._file.unlink()  # writing to a pipe would wait for a reader
                write_atomically(self._file, "[" + ",\n".join(_rows(measurements)) + "]\n")
            _REPORTED.discard(self._file)
        except OSError as error:  # a reply does not fail because its speed cannot be recorded, nor wait for a lock
            logger.info("the speed of a reply cannot be kept: %s", error)

    def read(self) -> Measurements:
        """Read the file; a damaged one is reported once and counts as empty."""
        try:
            rows = _CONTENT.validate_json(_read_regular(self._file))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            if self._file not in _REPORTED:
                _REPORTED.add(self._file)
                reason = "it is damaged" if isinstance(error, ValidationError) else error
                logger.warning("%s cannot be read (%s): no speed is known", self._file, reason)
            return {}
        return {Series(*row[:-1]): row[-1] for row in rows}


def _rows(measurements: Measurements) -> Iterator[str]:
    """Yield the file's rows, without impossible values, and without names that are too long or may not be text."""
    for series, values in measurements.items():
        possible = [float(f"{value:.4g}") for value in values if _is_possible(series.quantity, value)]
        if possible and len(json.dumps(series)) <= _MAX_NAMES and all(map(str.isprintable, series)):
            yield json.dumps([*series, possible])


def _is_possible(quantity: Quantity, value: float) -> bool:
    """Whether a value can be one of seconds, or an acceptance rate: below 1, of which a pass has endless tokens."""
    return 0 <= value < 1 if quantity == "acceptance" else 0 < value < math.inf


_SeriesRow = tuple[str, Mode, Load, str, Quantity, Annotated[list[float], Field(min_length=1, max_length=WINDOW)]]


def _check_values(rows: list[_SeriesRow]) -> list[_SeriesRow]:
    if not all(_is_possible(quantity, value) for *_, quantity, values in rows for value in values):
        raise ValueError("a pace or an acceptance rate is impossible")
    return rows


_CONTENT = TypeAdapter(Annotated[list[_SeriesRow], AfterValidator(_check_values)], config=ConfigDict(strict=True))


def _read_regular(file: Path) -> bytes:
    """Read a small regular file; raises OSError for anything else, which may have no end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise OSError("it is not a small regular file")
        return opened.read(_MAX_BYTES)


@dataclass(frozen=True)
class CPUTime:
    """CPU seconds used until a moment."""

    total: float  # CPU seconds of all programs on this process's cores
    own: float  # CPU seconds of this process and its children
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
