"""What replies really took in each arrangement of engines, kept on disk: it goes before what is predicted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence

from filelock import FileLock

from lookahead_agent.engines.cores import available_cores
from lookahead_agent.machine.choice import REPLY_TOKENS
from lookahead_agent.machine.kernels import FORM, processor, versions
from lookahead_agent.models.cache import cache_dir

logger = logging.getLogger(__name__)

_WEIGHT = 0.2
"""Of a new reply against all before it."""
_SHORTEST = 32
"""Tokens of a reply from which it tells something of the machine and not only of its prompt."""


class Observed:
    """Seconds of a typical reply by arrangement, for one pair of models on one machine.

    Args:
        models: The models' folders.
    """

    def __init__(self, models: Sequence[str]) -> None:
        known = json.dumps([processor(), len(available_cores()), versions(), list(models), FORM])
        digest = hashlib.sha256(known.encode()).hexdigest()[:16]
        self._file = cache_dir() / "machine" / f"observed-{digest}.json"

    def seconds(self) -> dict[str, float]:
        """What is known, by `Arrangement.name`."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): float(value) for name, value in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s cannot be read (%s): beginning anew", self._file, error)
            return {}

    def learn(self, arrangement: str, seconds: float, tokens: int) -> None:
        """Take in a reply that nothing else was written beside; short ones are left out.

        Args:
            arrangement: `Arrangement.name`.
            seconds: What the reply took.
            tokens: Tokens of the reply.
        """
        if tokens < _SHORTEST:
            return
        typical = seconds / tokens * REPLY_TOKENS
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._file.with_suffix(".lock")):
            known = self.seconds()
            before = known.get(arrangement, typical)
            known[arrangement] = before + _WEIGHT * (typical - before)
            unfinished = self._file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(known, indent=1), encoding="utf-8")
            os.replace(unfinished, self._file)
