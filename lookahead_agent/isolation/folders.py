"""A folder that somebody else fills: how much there is in it, and how it goes away, however it is nested or closed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ENTRY = 4096
"""Bytes that a file or folder counts at least: an empty one takes room too."""
FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def size(folder: Path, enough: int) -> int:
    """Bytes that a folder's files and folders take; it may be written to meanwhile.

    Args:
        folder: The folder.
        enough: Counting ends once there is more.
    """
    total = 0
    with opened(folder) as base:
        left = ["."]
        while left and total <= enough:
            name = left.pop()
            with suppress(OSError), opened(name, base) as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    total += max(_ENTRY, found.st_blocks * 512)
                    if stat.S_ISDIR(found.st_mode):
                        left.append(f"{name}/{entry.name}")
                    if total > enough:
                        break
    return total


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it; nobody writes to it any more.

    Raises:
        OSError: Something in it cannot be removed.
    """
    with opened(folder) as base:
        folders, left = [], ["."]
        while left:
            name = left.pop()
            folders.append(name)
            # Its owner may have closed it.
            os.chmod(name, 0o700, dir_fd=base)
            with opened(name, base) as descriptor, os.scandir(descriptor) as entries:
                for entry in list(entries):
                    if entry.is_dir(follow_symlinks=False):
                        left.append(f"{name}/{entry.name}")
                    else:
                        os.unlink(entry.name, dir_fd=descriptor)
        for name in reversed(folders[1:]):
            os.rmdir(name, dir_fd=base)
    os.rmdir(folder)


@contextmanager
def opened(name: str | Path, base: int | None = None) -> Iterator[int]:
    """A descriptor of a folder that is no link.

    Args:
        name: The folder.
        base: Descriptor of the folder that the name begins at; None: as usual.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(name, FLAGS, dir_fd=base)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
