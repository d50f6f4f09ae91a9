"""A file of results, one JSON object per line, that survives interruptions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lookahead_agent.errors import ConfigurationError

Row = dict[str, Any]


class RowFile:
    """Rows that were written, and the place to append more.

    Args:
        path: A JSON Lines file, which need not be there yet.

    Raises:
        ConfigurationError: It is there and is something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = list(_read(path))

    @contextmanager
    def writing(self) -> Iterator[RowFile]:
        """Be the only one who appends to the file.

        A line that an interruption cut off is removed, so that the next row does not become part of it.

        Raises:
            ConfigurationError: Another process writes to it, or nobody may.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=0):
                self.rows = list(_read(self.path))
                _end_at_whole_line(self.path)
                yield self
        except Timeout:
            raise ConfigurationError(
                f"another run writes to {self.path}: wait for it, or choose another file"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be written: {error.strerror}") from error

    def append(self, row: Row) -> None:
        """Write a row; it is in the file when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.rows.append(row)


def _read(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    whole, _, _ = text.rpartition("\n")
    for number, line in enumerate(whole.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{path}, line {number} is not JSON: is it a file of results?") from error
        if not isinstance(row, dict):
            raise ConfigurationError(f"{path}, line {number} is no row of results")
        yield row


def _end_at_whole_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
