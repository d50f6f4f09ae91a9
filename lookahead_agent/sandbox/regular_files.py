"""Reads a stranger's regular files: it follows no link and waits for no other process."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# Without O_NONBLOCK, opening a fifo would wait for a process at its other end.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def read_regular(path: str | Path, most: int, folder: int | None = None) -> bytes:
    """The bytes of a regular file.

    Args:
        path: The file.
        most: Bytes that it may have.
        folder: Descriptor of the folder that the path begins at; None: as usual.

    Raises:
        OSError: It cannot be opened, or is a link; IsADirectoryError: it is a folder.
        ValueError: It is no regular file, or too long; the message says which, as "is no regular file".
    """
    descriptor = os.open(path, _FLAGS, dir_fd=folder)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(kind):
            raise ValueError("is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise ValueError(f"is longer than {most} bytes")
    return data
