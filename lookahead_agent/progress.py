"""How long work (downloads, conversion, model loading) reports where it stands.

Library code never prints: it is handed a `Progress` and the command line passes one that draws bars.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)


class Task(Protocol):
    """One piece of work under way."""

    def advance(self, done: float) -> None:
        """Report that `done` units (of the task's total) are complete in all."""
        ...


class Progress(Protocol):
    """Something that shows tasks."""

    def task(self, description: str, total: float | None = None) -> AbstractContextManager[Task]:
        """Show a task while the context lasts; `total` in the units of `Task.advance`, None if unknown."""
        ...


class _SilentTask:
    def advance(self, done: float) -> None:
        return


class LogProgress:
    """Reports the beginning and the end of each task to the `lookahead_agent` logger."""

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        """Log `description` when the work begins and when it ends."""
        logger.info("%s…", description)
        yield _SilentTask()
        logger.info("%s: done", description)
