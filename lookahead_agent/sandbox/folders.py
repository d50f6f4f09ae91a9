"""Opens what a stranger fills: regular files, and folders without links."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a fifo would wait for a process at its other end.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


@contextmanager
def open_folder(name: str | Path, base: int | None = None) -> Iterator[int]:
    """A descriptor of a folder that is no link, below the folder of another descriptor if one is given.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(name, FLAGS, dir_fd=base)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: str | Path, most: int, folder: int | None = None) -> bytes:
    """The bytes of a regular file; no link is followed, and no other process is waited for.

    Args:
        path: The file.
        most: Bytes that it may have.
        folder: Descriptor of the folder that the path begins at; None: as usual.

    Raises:
        OSError: It cannot be opened, is a link, or is a folder (IsADirectoryError).
        ValueError: It is no regular file, or too long; the message says which, as "is no regular file".
    """
    descriptor = os.open(path, _FILE_FLAGS, dir_fd=folder)
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
