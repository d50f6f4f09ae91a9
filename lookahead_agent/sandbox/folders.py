"""Reads, measures and removes what a stranger fills: regular files, and folders however deep and closed."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ENTRY = 4096
"""Bytes that a file or folder counts at least: an empty one takes room too."""
_LONGEST_NAME = 4000
"""Bytes of a folder's name, from the counted folder on. Linux takes 4,095."""
FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a fifo would wait for a process at its other end.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def size(folder: Path, enough: int) -> int:
    """Bytes that a folder's files and folders take; it may be written to meanwhile.

    Counting ends once there is `enough`. Folders that are nested deeper than a name can tell count as more.
    """
    total = 0
    with suppress(FileNotFoundError), open_folder(folder) as base:
        left = ["."]
        while left and total <= enough:
            name = left.pop()
            if len(os.fsencode(name)) > _LONGEST_NAME:
                return enough + 1
            with suppress(OSError), open_folder(name, base) as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    total += max(_ENTRY, found.st_blocks * 512)
                    if stat.S_ISDIR(found.st_mode):
                        left.append(f"{name}/{entry.name}")
                    if total > enough:
                        break
    return total


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, however deep; nobody writes to it any more.

    Raises:
        OSError: Something in it cannot be removed.
    """
    with suppress(OSError):
        os.rmdir(folder)  # which needs no descriptor, where there is none left
        return
    os.chmod(folder, 0o700)  # its owner may have closed it
    with open_folder(folder) as base:
        names = itertools.filterfalse(set(os.listdir(base)).__contains__, map(str, itertools.count()))
        left = _emptied(base)
        while left:
            name = left.pop()
            with open_folder(name, base) as descriptor:
                for inner in _emptied(descriptor):
                    # Moved up, so that no name grows longer and no more than two folders are open.
                    left.append(next(names))
                    os.rename(inner, left[-1], src_dir_fd=descriptor, dst_dir_fd=base)
            os.rmdir(name, dir_fd=base)
    os.rmdir(folder)


def _emptied(folder: int) -> list[str]:
    """Remove all but the folders in it, which are opened to their owner. Returns their names."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if is_folder:
            os.chmod(name, 0o700, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in found if is_folder]


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
