"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from lookahead_agent.progress import Task


class _Bar:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, done: float) -> None:
        self._bars.update(self._task, completed=done)


class Bars:
    """Draws tasks as bars while they last, and leaves a line for each on a terminal or in a log."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        """Show one task."""
        if not self._console.is_terminal:
            self._console.print(f"{description} …", highlight=False)
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        ) as bars:
            task = bars.add_task(description, total=total)
            yield _Bar(bars, task)
            bars.update(task, total=total or 1, completed=total or 1)
