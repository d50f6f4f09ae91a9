"""How commands show tables."""

from __future__ import annotations

from rich.table import Table as RichTable

from lookahead_agent.bench.report import Table

WIDE = 160
"""Columns of tables where output goes to no terminal."""


def as_rich(table: Table, *, words: tuple[str, ...] = (), no_wrap: bool = False) -> RichTable:
    """A table as the terminal shows it: the first column and those of words to the left, numbers to the right.

    Args:
        table: Headings and rows.
        words: Headings of further columns that hold words.
        no_wrap: Keep cells on one line each.
    """
    headings, rows = table
    made = RichTable(box=None)
    for number, heading in enumerate(headings):
        left = number == 0 or heading in words
        made.add_column(heading, justify="left" if left else "right", no_wrap=no_wrap)
    for row in rows:
        made.add_row(*row)
    return made
