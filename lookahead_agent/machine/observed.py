"""The pace of real replies in each arrangement of engines, kept on disk: it goes before what is predicted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
from collections.abc import Sequence

from filelock import FileLock

from lookahead_agent.engines.cores import available_cores
from lookahead_agent.machine.kernels import FORM, processor, versions
from lookahead_agent.models.cache import cache_dir

logger = logging.getLogger(__name__)

_KEPT = 15
"""Latest replies of an arrangement that count. Their median: other programs slow single ones down."""


class Observed:
    """Seconds per token, without the prompt, by arrangement, for one pair of models on one machine.

    Args:
        models: The models' folders.
    """

    def __init__(self, models: Sequence[str]) -> None:
        known = json.dumps([processor(), len(available_cores()), versions(), list(models), FORM])
        digest = hashlib.sha256(known.encode()).hexdigest()[:16]
        self._file = cache_dir() / "machine" / f"paces-{digest}.json"

    def paces(self) -> dict[str, float]:
        """What is known, by `Arrangement.name`."""
        return {name: statistics.median(paces) for name, paces in self._read().items() if paces}

    def learn(self, arrangement: str, pace: float) -> None:
        """Take in a reply that nothing else was written beside.

        Args:
            arrangement: `Arrangement.name`.
            pace: Seconds per token after the first: `ReplyReport.pace`.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._file.with_suffix(".lock")):
            known = self._read()
            known[arrangement] = [*known.get(arrangement, []), pace][-_KEPT:]
            unfinished = self._file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(known, indent=1), encoding="utf-8")
            os.replace(unfinished, self._file)

    def _read(self) -> dict[str, list[float]]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): [float(pace) for pace in paces] for name, paces in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s cannot be read (%s): beginning anew", self._file, error)
            return {}
