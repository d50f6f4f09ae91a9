"""A file of results, one JSON object per line, that survives interruptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.jsonl import append_line, end_at_whole_line, is_compressed, read_lines, read_value

Row = dict[str, Any]


class RowFile:
    """Rows that were written, and the place to append more.

    Args:
        path: A JSON Lines file, which need not be there yet. One that gzip (.gz) or xz (.xz) compressed is only read.

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
            ConfigurationError: Another process writes to it, nobody may, or it is compressed.
        """
        if is_compressed(self.path):
            raise ConfigurationError(f"{self.path} is compressed, and only read: choose a file that ends with .jsonl")
        with ExitStack() as held:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(f"{self.path}.lock", timeout=0))
                self.rows = list(_read(self.path))
                if self.path.is_file():
                    with self.path.open("r+b") as file:
                        end_at_whole_line(file)
            except Timeout:
                raise ConfigurationError(
                    f"another run writes to {self.path}: wait for it, or choose another file"
                ) from None
            except OSError as error:
                raise ConfigurationError(f"{self.path} cannot be written: {error.strerror or error}") from error
            yield self

    def append(self, row: Row) -> None:
        """Write a row; it is in the file when this returns.

        Raises:
            ConfigurationError: It cannot be written; the rows before it are kept.
        """
        try:
            with self.path.open("ab", buffering=0) as file:
                append_line(file, row)
        except OSError as error:
            raise ConfigurationError(
                f"{self.path} cannot be written: {error.strerror or error}. The {len(self.rows)} rows before are kept: "
                "run the same again to go on"
            ) from error
        self.rows.append(row)


def _read(path: Path) -> Iterator[Row]:
    if not (path.is_file() or path.is_dir()):  # not there yet, or a device
        return
    try:
        *whole, _ = read_lines(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8: is it a file of results?") from error
    for number, line in enumerate(whole, 1):
        if not line.strip():
            continue
        try:
            row = read_value(line)
        except ValueError as error:
            raise ConfigurationError(f"{path}, line {number} is not JSON: is it a file of results?") from error
        if not isinstance(row, dict):
            raise ConfigurationError(f"{path}, line {number} is no row of results")
        yield row
