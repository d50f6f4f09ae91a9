"""What real replies of a pair showed, kept on disk: their pace, and how often draft tokens were right."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections.abc import Sequence

from filelock import FileLock

from lookahead_agent.cpu.cores import available_cores
from lookahead_agent.hardware.kernels import processor, versions
from lookahead_agent.models.cache import cache_dir, write_whole

logger = logging.getLogger(__name__)

_KEPT = 15
"""Latest replies that count. Their median: a single one may have been slow for many reasons."""
_LEAST = 3
"""Replies before an arrangement's pace counts: a single one may have been slowed down by something else."""
_FORM = 8
"""What is kept is only read in this form: until 7, replies counted that other programs had slowed down."""
_RIGHT = "draft tokens that were right"
"""Among the arrangements' names in the file."""


class Observed:
    """What replies of one pair of models on one machine showed: it goes before what is predicted.

    Args:
        models: The models' folders.
    """

    def __init__(self, models: Sequence[str]) -> None:
        known = json.dumps([processor(), len(available_cores()), versions(), list(models), _FORM])
        digest = hashlib.sha256(known.encode()).hexdigest()[:16]
        self._file = cache_dir() / "hardware" / f"paces-{digest}.json"

    def paces(self) -> dict[str, float]:
        """Seconds per token, without the prompt, by `Arrangement.name`, of those in which a few replies were seen."""
        return {
            name: statistics.median(paces)
            for name, paces in self._read().items()
            if len(paces) >= _LEAST and name != _RIGHT
        }

    def acceptance_rate(self) -> float | None:
        """Share of draft tokens that were right; None until one was guessed."""
        found = self._read().get(_RIGHT)
        return statistics.median(found) if found else None

    def learn(self, arrangement: str, pace: float, right: float | None = None) -> None:
        """Take in a reply beside which nothing else ran.

        Args:
            arrangement: `Arrangement.name`.
            pace: Seconds per token after the first: `ReplyReport.pace`.
            right: Share of its draft tokens that were right; None: none were guessed, or it cannot be told.
        """
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._file.with_suffix(".lock")):
                known = self._read()
                for name, value in ((arrangement, pace), (_RIGHT, right)):
                    if value is not None:
                        known[name] = [*known.get(name, []), value][-_KEPT:]
                write_whole(self._file, json.dumps(known, indent=1))
        except OSError as error:  # a reply does not fail because its pace cannot be kept
            logger.info("the pace of a reply cannot be kept: %s", error)

    def _read(self) -> dict[str, list[float]]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): [float(pace) for pace in paces] for name, paces in found.items()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s cannot be read (%s): beginning anew", self._file, error)
            return {}
