"""Where models are kept on disk, and the checks that a file is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock

from lookahead_agent.errors import ConfigurationError, DiskSpaceError
from lookahead_agent.progress import Task

CACHE_VARIABLE = "LOOKAHEAD_AGENT_CACHE"


def cache_dir() -> Path:
    """Folder of fetched models: `$LOOKAHEAD_AGENT_CACHE`, else `lookahead-agent` in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("lookahead-agent"))


def require_disk_space(folder: Path, needed: int, purpose: str) -> None:
    """Check that the file system of `folder` has `needed` bytes free.

    Raises:
        DiskSpaceError: It has not; the message says how much is missing and how to choose another folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskSpaceError(
            f"{purpose} needs {needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB free. "
            f"Free some space or set {CACHE_VARIABLE} to a folder on a larger disk."
        )


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder that appears under its name by one rename, once it is complete; one process makes it.

    Args:
        folder: The folder; returned at once if it is there.
        make: Fills the empty folder that it is given; what it leaves when it fails is removed.
    """
    if folder.is_dir():
        return folder
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{folder.name}.lock"):
        if folder.is_dir():  # another process made it while this one waited
            return folder
        for leftover in root.glob(f"{folder.name}.unfinished-*"):
            shutil.rmtree(leftover)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.unfinished-", dir=root))
        try:
            make(unfinished)
            unfinished.chmod(0o755)
            os.replace(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def writable(file: Path) -> Iterator[None]:
    """Write a file that a user has named within this context; its folder is made.

    Raises:
        ConfigurationError: It cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error.strerror}") from error


def write_whole(file: Path, text: str) -> None:
    """Write a text file that is there whole or not at all, in place of the one before."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def sha256_of(path: Path, task: Task | None = None) -> str:
    """Hex sha256 of a file; `task` is told the bytes read so far."""
    digest = hashlib.sha256()
    read = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            read += len(chunk)
            if task is not None:
                task.advance(read)
    return digest.hexdigest()
