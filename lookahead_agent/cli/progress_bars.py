"""Progress bars on stderr."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from lookahead_agent.cli.terminal import Terminal
from lookahead_agent.progress import Task


class _Bar:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, done: float) -> None:
        self._bars.update(self._task, completed=done)


class Bars:
    """Draws tasks as bars while they last, and leaves a line for each on a terminal or in a log.

    Tasks may last at the same time, in different threads: a terminal has one place for all of their bars.
    """

    def __init__(self) -> None:
        self._console = Terminal(stderr=True)
        self._lock = threading.Lock()
        self._bars = self._new_bars()
        self._lasting = 0

    def _new_bars(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        """Show one task."""
        if not self._console.is_terminal:
            self._console.print(f"{description} …")
        with self._lock:
            if self._lasting == 0:
                self._bars.start()
            self._lasting += 1
            bars = self._bars
        try:
            task = bars.add_task(description, total=total)
            yield _Bar(bars, task)
            bars.update(task, total=total or 1, completed=total or 1)
        finally:
            with self._lock:
                self._lasting -= 1
                if self._lasting == 0:
                    bars.stop()
                    self._bars = self._new_bars()  # without the lines that are on the terminal already
