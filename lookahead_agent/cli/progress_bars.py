"""Progress bars on stderr."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from lookahead_agent.cli.terminal import Terminal
from lookahead_agent.progress import Task


class ProgressBars:
    """Draws tasks as bars while they last, and leaves a line for each on a terminal or in a log.

    Tasks may last at the same time, in different threads: a terminal has one place for all of their bars.
    """

    def __init__(self, terminal: Terminal | None = None) -> None:
        self._console = terminal or Terminal(stderr=True)
        self._lock = threading.Lock()
        self._bars = self._new_bars()
        self._lasting = 0

    def _new_bars(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            # A long description is cut, so that a task is one line.
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=10),
            TaskProgressColumn(table_column=Column(no_wrap=True, min_width=4)),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
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


@dataclass(frozen=True)
class _Bar:
    bars: Progress
    task: TaskID

    def advance(self, done: float) -> None:
        self.bars.update(self.task, completed=done)
