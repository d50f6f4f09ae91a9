"""JSON Lines: files with a JSON value on each line, where nothing but a line feed ends a line.

`str.splitlines` and readers like it also split at U+2028, U+0085 and others, which may stand within a JSON string.
Lines are written in ASCII, so that they mislead no reader and keep lone surrogates.
"""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import os
import zlib
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO


def line_of(value: Any) -> str:
    """A value as a line, with its line feed."""
    return json.dumps(value) + "\n"


def append_line(file: FileIO, value: Any) -> None:
    """Write a value's line to a file that is open without a buffer; of what a full disk cuts off nothing stays.

    Raises:
        OSError: It cannot be written.
    """
    before = os.fstat(file.fileno()).st_size
    rest = memoryview(line_of(value).encode())
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with suppress(OSError):  # a device or a pipe
            file.truncate(before)
        raise


def is_compressed(path: Path) -> bool:
    """Whether the name says that gzip or xz compressed the file."""
    return path.suffix in (".gz", ".xz")


def read_content(path: Path) -> bytes:
    """What a file holds, decompressed where its name ends with .gz or .xz.

    Raises:
        OSError: It cannot be read.
    """
    content = path.read_bytes()
    if not is_compressed(path):
        return content
    try:
        return gzip.decompress(content) if path.suffix == ".gz" else lzma.decompress(content)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(errno.EINVAL, f"it is no whole {path.suffix} file", str(path)) from error


def read_lines(path: Path) -> list[str]:
    """The lines of a file without their line feeds; the last is empty where the file ends with a line feed.

    Raises:
        OSError: It cannot be read.
        UnicodeDecodeError: It is not UTF-8.
    """
    return read_content(path).decode("utf-8-sig").split("\n")


def read_value(line: str) -> Any:
    """The value of a line.

    Raises:
        ValueError: It is not JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def end_at_whole_line(file: BinaryIO) -> None:
    """Take off what an interruption left of a line at the end of an open regular file."""
    end = file.seek(0, 2)
    while end > 0:
        begin = max(0, end - (1 << 16))
        file.seek(begin)
        if (place := file.read(end - begin).rfind(b"\n")) >= 0:
            end = begin + place + 1
            break
        end = begin
    file.truncate(end)
