"""JSON Lines: files with a JSON value on each line, where only a line feed ends a line.

`str.splitlines` and similar readers also split at U+2028, U+0085 and others, which may occur within a JSON string.
Lines are written in ASCII, so that every reader splits them alike and lone surrogates survive.
"""

from __future__ import annotations

import errno
import json
import lzma
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lookahead_agent.errors import ConfigurationError

Row = dict[str, Any]


def append_line(file: FileIO, value: Any) -> None:
    """Append a value's line to an unbuffered file; a failed write, as on a full disk, leaves no part of it."""
    before = os.fstat(file.fileno()).st_size
    remaining = memoryview(f"{json.dumps(value)}\n".encode())
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError:
        with suppress(OSError):  # devices and pipes cannot be truncated
            file.truncate(before)
        raise


def read_content(path: Path) -> bytes:
    """Read a file, decompressed if its name ends with .xz; raises OSError if it cannot be read."""
    content = path.read_bytes()
    if path.suffix != ".xz":
        return content
    try:
        return lzma.decompress(content)
    except (EOFError, lzma.LZMAError) as error:
        raise OSError(errno.EINVAL, "it is not a whole .xz file", str(path)) from error


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file without their line feeds; the last is empty if the file ends with a line feed."""
    return read_content(path).decode("utf-8-sig").split("\n")


def read_value(line: str) -> Any:
    """Parse the value of a line; raises ValueError if it is not JSON, or nested too deeply."""
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class RowFile:
    """Rows of results in a file that survives interruptions. The file may be missing; a compressed one is read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = list(_rows(path))

    @contextmanager
    def open_for_writing(self) -> Iterator[RowFile]:
        """Lock the file against other processes, and remove a line that an interruption truncated."""
        if self.path.suffix == ".xz":
            raise ConfigurationError(f"{self.path} is compressed, and only read: choose a file that ends with .jsonl")
        with ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(f"{self.path}.lock", timeout=0, mode=0o600))
                self.rows = list(_rows(self.path))
                self.end_at_whole_line()
            except Timeout:
                raise ConfigurationError(
                    f"another run writes to {self.path}: wait for it, or choose another file"
                ) from None
            except OSError as error:
                raise ConfigurationError(f"{self.path} cannot be written: {error.strerror or error}") from error
            yield self

    def end_at_whole_line(self) -> None:
        """Remove an incomplete line at the file's end."""
        if self.path.is_file():
            with self.path.open("r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def append(self, row: Row) -> None:
        """Append a row; it is in the file when this returns."""
        try:
            with self.path.open("ab", buffering=0) as file:
                append_line(file, row)
        except OSError as error:
            raise ConfigurationError(
                f"{self.path} cannot be written: {error.strerror or error}. The {len(self.rows)} rows before are kept: "
                "run the same again to continue"
            ) from error
        self.rows.append(row)


def _rows(path: Path) -> Iterator[Row]:
    if not (path.is_file() or path.is_dir()):  # missing, or a device
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
            raise ConfigurationError(f"{path}, line {number} is not a row of results")
        yield row
