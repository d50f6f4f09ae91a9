"""Temporary files of processes that may be killed: locked while they are needed, and removed by a later process."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


def made_and_locked(make: Callable[[], str]) -> tuple[Path, int]:
    """Make a file or a folder that `remove_leftovers` leaves alone until its lock is closed.

    Args:
        make: Makes it and returns its path.

    Returns:
        The path, and the descriptor that holds the lock; the system closes it however this process ends.
    """
    while True:
        path = Path(make())
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if path.exists():  # else another process has removed it before it was locked
            return path, descriptor
        os.close(descriptor)


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove what killed processes of this user have left: files and folders that nobody locks.

    Args:
        folder: Where they are.
        prefix: How their names begin, and no others.
    """
    for path in folder.glob(f"{prefix}*"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # it is gone, or is a link
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        except BlockingIOError:
            logger.debug("%s is in use", path)
        finally:
            os.close(descriptor)
