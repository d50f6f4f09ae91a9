"""The cache of models on disk, and the checks that their files are complete."""

import errno
import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from lookahead_agent.engines.model_files import read_object
from lookahead_agent.errors import ConfigurationError, DiskSpaceError, ModelError
from lookahead_agent.system.files import CACHE_VARIABLE
from lookahead_agent.system.progress import Advance

logger = logging.getLogger(__name__)

GGUF = "model.gguf"  # weights of a packaged model, in a folder with its configuration and tokenizer
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes of a safetensors header, as the format says
_JSON = (
    "config.json",
    _INDEX,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
"""Small JSON objects that a model is loaded from; the vocabulary, of megabytes, is checked where it is read."""


def require_disk_space(folder: Path, needed: int, purpose: str) -> None:
    """Raise DiskSpaceError unless the file system of `folder` has `needed` bytes free."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskSpaceError(
            f"{purpose} needs {needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB free. "
            f"Free some space or set {CACHE_VARIABLE} to a folder on a larger disk."
        )


def create_once(
    folder: Path,
    make: Callable[[Path], None],
    check: Callable[[Path], str | None] = lambda folder: damage(folder, weights="wanted"),
    patience: float = 600.0,
) -> Path:
    """Return a model's folder; if it is missing or `check` finds damage, `make` fills a new one, which is renamed.

    One process at a time fills it; others wait, as long as its files grow at least every `patience` seconds. Raises
    DiskSpaceError for a full disk, ConfigurationError for an unwritable one, ModelError if the other process hangs.
    """

    def is_complete() -> bool:
        return folder.is_dir() and check(folder) is None

    root = folder.parent
    with _convert_disk_errors(root):
        if is_complete():
            return folder
        root.mkdir(parents=True, exist_ok=True)
        with file_lock(root / f"{folder.name}.lock") as lock:
            if not _acquire(lock, folder, is_complete, patience):
                return folder
            if folder.is_dir():
                if (problem := check(folder)) is None:  # another process created it while this one waited
                    return folder
                logger.warning("%s is damaged (%s) and is made anew", folder, problem)
                shutil.rmtree(folder)
            for leftover in root.glob(f"{folder.name}.unfinished-*"):
                shutil.rmtree(leftover)
            unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.unfinished-", dir=root))
            try:
                make(unfinished)
                unfinished.chmod(0o755)
                for path in filter(Path.is_file, unfinished.rglob("*")):
                    with path.open("rb") as file:
                        os.fsync(file.fileno())  # otherwise a power loss may leave zeros in it after the rename
                os.replace(unfinished, folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def file_lock(path: Path) -> Iterator[FileLock]:
    """A lock between processes, which only this user can hold; it is released at the end of the context."""
    lock = FileLock(path, mode=0o600)
    try:
        yield lock
    finally:
        lock.release()


def _acquire(lock: FileLock, folder: Path, is_complete: Callable[[], bool], patience: float) -> bool:
    """Acquire the lock of a model's folder; False if the folder is complete before, so that no lock is needed."""
    progress, deadline = -1, 0.0
    while True:
        with suppress(Timeout):
            lock.acquire(timeout=min(1.0, patience))
            return True
        if is_complete():
            return False
        if (now := _bytes_of_unfinished(folder)) != progress:
            progress, deadline = now, time.monotonic() + patience
        elif time.monotonic() >= deadline:
            raise ModelError(
                f"another process has held {lock.lock_file} for {patience:g} s without progress: end it (it may be "
                "stopped), or remove that file, and run again"
            )


def _bytes_of_unfinished(folder: Path) -> int:
    """The size of what another process has written so far of a model's folder."""
    total = 0
    for pattern in (f"{folder.name}.unfinished-*", f"{folder.name}.parts"):
        for root in folder.parent.glob(pattern):
            for file in root.rglob("*"):
                with suppress(OSError):  # removed meanwhile
                    total += file.stat().st_size
    return total


@contextmanager
def _convert_disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise DiskSpaceError(
                f"the disk of {root} is full. Free some space and run again: parts that are complete are kept."
            ) from error
        if isinstance(error, PermissionError | FileExistsError | NotADirectoryError) or error.errno == errno.EROFS:
            raise ConfigurationError(
                f"models cannot be kept in {root} ({error.strerror}: {error.filename or root}): "
                f"set {CACHE_VARIABLE} to a folder that may be written"
            ) from error
        raise


def damage(folder: Path, *, weights: Literal["wanted", "checked", "ignored"] = "checked") -> str | None:
    """The damage to a model's files that is visible without reading all of its weights; None if there is none.

    With `weights="wanted"`, missing weights are damage too; with "ignored", weights are not checked.
    """
    texts = [folder / name for name in _JSON if os.path.lexists(folder / name)]
    if (found := next((problem for file in texts if (problem := _json_problem(file)) is not None), None)) is not None:
        return found
    if weights == "ignored":
        return None
    try:
        names = weight_names(folder)
    except ValueError as error:
        return str(error)
    gguf = folder / GGUF
    if weights == "wanted" and not names and not gguf.is_file():
        return "there are no weights"
    if (names or gguf.is_file()) and not (folder / "config.json").is_file():
        return "config.json is missing"
    if gguf.is_file() and (problem := _gguf_problem(gguf)) is not None:
        return problem
    return next((problem for name in names if (problem := _weights_problem(folder / name)) is not None), None)


def weight_names(folder: Path) -> list[str]:
    """The names of the safetensors files with a model's weights; raises ValueError if its weight map is damaged."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(file.name for file in folder.glob("*.safetensors"))
    weight_map = read_object(index).get("weight_map")
    # A name with a folder could be any file of this machine.
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise ValueError(f"the weight_map of {_INDEX} has other values than names of files in its folder")
    return sorted(set(weight_map.values()))


def _json_problem(file: Path) -> str | None:
    try:
        read_object(file)
    except (OSError, ValueError) as error:
        return f"{file.name} cannot be read: {error}"
    return None


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def _gguf_problem(file: Path) -> str | None:
    with file.open("rb") as content:
        header = content.read(24)
    if header[:4] != b"GGUF":
        return f"{file.name} is not a GGUF file"
    if len(header) < 24:
        return f"{file.name} is not a whole GGUF file"
    version, tensors, keys = struct.unpack("<IQQ", header[4:])
    if not 1 <= version <= 3 or max(tensors, keys) > file.stat().st_size:
        return f"{file.name} has no valid GGUF header"
    return None


def _weights_problem(file: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        if not file.is_file():
            raise FileNotFoundError(errno.ENOENT, "there is no such file")
        with file.open("rb") as content:
            (length,) = struct.unpack("<Q", content.read(8).ljust(8, b"\0"))
            if length > min(_MAX_HEADER, file.stat().st_size):
                raise ValueError("its header is longer than it may be")
            json.loads(content.read(length), object_pairs_hook=_without_repeated_names)
        with safe_open(file, framework="numpy"):  # it reads the header, which has the file's length
            return None
    except RecursionError:
        return f"{file.name} is not a whole safetensors file: its header is nested too deeply"
    except (SafetensorError, OSError, ValueError, TypeError, OverflowError) as error:
        return f"{file.name} is not a whole safetensors file: {error}"


def _without_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(names := dict(pairs)) < len(pairs):
        raise ValueError("its header has a name twice")
    return names


def sha256_of(path: Path, advance: Advance | None = None) -> str:
    """The hex sha256 of a file; `advance` gets the number of bytes read so far."""
    digest = hashlib.sha256()
    read = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            read += len(chunk)
            if advance is not None:
                advance(read)
    return digest.hexdigest()
