"""Progress of long tasks: library code never prints, and the command line passes an object that draws bars."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)


Advance = Callable[[float], None]  # reports how many units of a task's total are complete


class Progress(Protocol):
    """Shows the progress of tasks."""

    def task(self, description: str, total: float | None = None) -> AbstractContextManager[Advance]:
        """Show a task while the context lasts; `total` in any unit, None if unknown."""
        ...


class LogProgress:
    """Logs the beginning and the end of each task to the `lookahead_agent` logger."""

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Advance]:
        """Log `description` when the task begins and when it ends."""
        logger.info("%s…", description)
        yield lambda _: None
        logger.info("%s: done", description)
