"""Where models are kept on disk, and the checks that a file is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import platformdirs

from lookahead_agent.errors import DiskSpaceError
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
