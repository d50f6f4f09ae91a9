"""The terminal, where texts that the library did not write are shown as text."""

import logging
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from lookahead_agent.plain_text import plain
from lookahead_agent.progress import Advance

WIDE = 160  # Columns of tables where output goes to no terminal


class Terminal(Console):
    """A console that takes no text as markup, and lets no text command the terminal; commands print through one."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, **options: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **options)
        if width is not None and not self.is_terminal:  # which has 80 columns otherwise
            self.width = width

    def render_str(self, text: str, **options: Any) -> Text:
        """A text as it is laid out: without what would take up no place."""
        return super().render_str(plain(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The text that is written; Rich's own terminal sequences stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)

    def heading(self, title: str) -> None:
        """Begin a part of the output."""
        self.rule(Text(title, "bold"), align="left")

    def error(self, message: object) -> None:
        """Tell what went wrong, on a line."""
        self.print("Error:", style="red", end="")
        self.print(f" {message}", soft_wrap=True)


def as_rich(
    table: tuple[Sequence[str], Iterable[Sequence[str | Text]]], *, words: Collection[str] = (), no_wrap: bool = False
) -> Table:
    """A table of headings and rows: the first column and those of `words` to the left, numbers to the right."""
    # Only columns of words break where the terminal is narrow, and none with `no_wrap`.
    headings, rows = table
    made = Table(box=None, show_header=any(headings))
    for number, heading in enumerate(headings):
        left = number == 0 or heading in words
        made.add_column(heading, justify="left" if left else "right", no_wrap=no_wrap or not left, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def echo(text: object, *, nl: bool = True) -> None:
    """Write a text to stdout as it is, tabs and long lines included, but for what `plain` takes out."""
    if sys.stdout is not None:  # it was closed before this process began
        sys.stdout.write(plain(str(text)) + ("\n" if nl else ""))
        sys.stdout.flush()


class LogFormatter(logging.Formatter):
    """Log lines whose texts command no terminal and look like no other lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """A record in its format; further lines of it are indented."""
        return plain(super().formatMessage(record)).replace("\n", "\n    ")

    def formatException(self, ei: Any) -> str:
        """A traceback."""
        return plain(super().formatException(ei))


class ProgressBars:
    """Draws tasks as bars while they last, and leaves a line for each on a terminal or in a log."""

    # Tasks may last at the same time, in different threads: a terminal has one place for all of their bars.

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
    def task(self, description: str, total: float | None = None) -> Iterator[Advance]:
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
            yield lambda done: bars.update(task, completed=done)
            bars.update(task, total=total or 1, completed=total or 1)
        finally:
            with self._lock:
                self._lasting -= 1
                if self._lasting == 0:
                    bars.stop()
                    self._bars = self._new_bars()  # without the lines that are on the terminal already
