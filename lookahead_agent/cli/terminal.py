"""The terminal, where texts that the library did not write are shown as text."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lookahead_agent.plain_text import plain

WIDE = 160
"""Columns of tables where output goes to no terminal."""


class Terminal(Console):
    """A console that takes no text as markup, and lets no text command the terminal.

    All that commands print goes through one: texts of models, tools, files, servers and users are among it. Styles are
    given by `style` or in a `Text`. The same is taken out where output goes to a file or a pipe; `--json` has the texts
    as they are, in escapes.

    Args:
        stderr: Write to stderr.
        width: Columns where output goes to no terminal; None: 80.
        options: Further ones of `Console`.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None, **options: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **options)
        if width is not None and not self.is_terminal:
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
    """A table as the terminal shows it: the first column and those of words to the left, numbers to the right.

    Args:
        table: Headings and rows. No line of headings is shown where all are empty.
        words: Headings of further columns that hold words. Only these break where columns are few.
        no_wrap: Break none.
    """
    headings, rows = table
    made = Table(box=None, show_header=any(headings))
    for number, heading in enumerate(headings):
        left = number == 0 or heading in words
        made.add_column(heading, justify="left" if left else "right", no_wrap=no_wrap or not left)
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

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """A traceback."""
        return plain(super().formatException(ei))
