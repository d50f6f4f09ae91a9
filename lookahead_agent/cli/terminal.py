"""Terminal output, with terminal sequences removed from texts of models, tools and users."""

import logging
import re
import sys
import textwrap
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from lookahead_agent.system.plain_text import plain
from lookahead_agent.system.progress import Advance

WIDE = 160  # Columns of tables if the output is not a terminal
_UNLIMITED = 10_000


class WordWrap:
    """Breaks the lines of a streamed text between words; a word waits for its end. None is an unlimited width."""

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._column = 0
        self._spaces = self._word = ""  # not yet returned

    def feed(self, text: str) -> str:
        """Return what may be printed now."""
        if self._width is None:
            return text
        parts = []
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part == "\n":
                parts += [self._complete_word(), "\n"]
                self._column, self._spaces = 0, ""
            elif part.isspace():
                parts.append(self._complete_word())
                self._spaces += part
            else:
                self._word += part
        return "".join(parts)

    def end(self) -> str:
        """Return the remaining word."""
        return self._complete_word()

    def _complete_word(self) -> str:
        if not self._word:
            return ""
        word, spaces, self._word, self._spaces = self._word, self._spaces, "", ""
        if self._column and self._column + cell_len(spaces + word) > (self._width or 0):
            self._column = cell_len(word)
            return f"\n{word}"
        self._column += cell_len(spaces + word)
        return spaces + word


class Terminal(Console):
    """A Rich console without markup that removes terminal sequences from every text; commands print with it."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, **options: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **options)
        if width is not None and not self.is_terminal:  # Rich assumes 80 columns
            self.width = width

    def render_str(self, text: str, **options: Any) -> Text:
        """Lay out a text without control characters, which take up no columns."""
        return super().render_str(plain(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render without control characters in texts; Rich's own terminal sequences remain."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)

    def text(self, text: str, *, label: str = "", style: str = "bold") -> None:
        """Print a text after a label in a style; on a terminal, long lines break between words."""
        wrap = self.word_wrap()
        shown = Text(wrap.feed(plain(label + text)) + wrap.end())
        shown.stylize(style, 0, len(label))
        self.print(shown, soft_wrap=True)

    def word_wrap(self) -> WordWrap:
        """Return what breaks the lines of a streamed text between words, if this is a terminal."""
        return WordWrap(self.width if self.is_terminal else None)

    def print_heading(self, title: str) -> None:
        """Print the title of a section."""
        self.rule(Text(title, "bold"), align="left")

    def error(self, message: object) -> None:
        """Print an error message."""
        self.text(f" {message}", label="Error:", style="red")


def as_rich(
    table: tuple[Sequence[str], Iterable[Sequence[str | Text]]], *, words: Collection[str] = (), no_wrap: bool = False
) -> Table:
    """Build a Rich table; the first column and those in `words` are aligned left, numbers right."""
    # Only left columns wrap on a narrow terminal, and none with `no_wrap`.
    headings, rows = table
    built = Table(box=None, show_header=any(headings))
    for number, heading in enumerate(headings):
        left = number == 0 or heading in words
        built.add_column(heading, justify="left" if left else "right", no_wrap=no_wrap or not left, overflow="fold")
    for row in rows:
        built.add_row(*row)
    return built


def fit(
    terminal: Terminal, table: tuple[Sequence[str], Sequence[Sequence[str]]], *, words: Collection[str] = ()
) -> list[Table]:
    """Build tables that fit the terminal's width: the leading columns of `words` are in each, the others in turns."""
    headings, rows = table
    columns = [[heading, *(row[number] for row in rows)] for number, heading in enumerate(headings)]
    leading = next(
        (number for number, heading in enumerate(headings) if number and heading not in words), len(headings)
    )

    def build(chosen: Sequence[int], *, no_wrap: bool = True) -> Table:
        shown = [_wrap_heading(columns[number]) for number in chosen]
        cells = [[column[place] for column in shown] for place in range(len(rows) + 1)]
        # A wrapped heading is no longer one of `words`.
        left = [cells[0][place] for place, number in enumerate(chosen) if headings[number] in words]
        return as_rich((cells[0], cells[1:]), words=left, no_wrap=no_wrap)

    def fits(chosen: Sequence[int]) -> bool:
        # A measure is at most the width of its options.
        unlimited = terminal.options.update(max_width=_UNLIMITED)
        return terminal.measure(build(chosen), options=unlimited).maximum <= terminal.width

    keys, remaining, built = list(range(leading)), list(range(leading, len(headings))), list[Table]()
    while remaining or not built:
        count = len(remaining)
        while count > 1 and not fits(keys + remaining[:count]):
            count -= 1
        chosen, remaining = keys + remaining[:count], remaining[count:]
        built.append(build(chosen, no_wrap=fits(chosen)))
    return built


def _wrap_heading(column: Sequence[str]) -> list[str]:
    """Break a column's heading between words, so that it is not wider than its cells or its longest word."""
    heading, *cells = column
    width = max([*map(len, cells), *map(len, heading.split()), 1])
    return ["\n".join(textwrap.wrap(heading, width)), *cells]


def echo(text: object, *, nl: bool = True) -> None:
    """Write `plain(text)` to stdout, without Rich's handling of tabs and long lines."""
    if sys.stdout is not None:  # closed before this process started
        sys.stdout.write(plain(str(text)) + ("\n" if nl else ""))
        sys.stdout.flush()


class LogFormatter(logging.Formatter):
    """Formats log records without terminal sequences, so that no text can look like another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format a record; its further lines are indented."""
        return plain(super().formatMessage(record)).replace("\n", "\n    ")

    def formatException(self, ei: Any) -> str:
        """Format a traceback."""
        return plain(super().formatException(ei))


class ProgressBars:
    """Draws a progress bar for each running task, and leaves a line for each on a terminal or in a log."""

    # Tasks of different threads may overlap: a terminal can have only one live display for all bars.

    def __init__(self, terminal: Terminal | None = None) -> None:
        self._console = terminal or Terminal(stderr=True)
        self._lock = threading.Lock()
        self._bars = self._new_bars()
        self._running = 0

    def _new_bars(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            # A long description is truncated, so that a task takes one line.
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
            if self._running == 0:
                self._bars.start()
            self._running += 1
            bars = self._bars
        try:
            task = bars.add_task(description, total=total)
            yield lambda done: bars.update(task, completed=done)
            bars.update(task, total=total or 1, completed=total or 1)
        finally:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    bars.stop()
                    self._bars = self._new_bars()  # so that finished lines are not drawn again
