"""Where models are kept on disk, and the checks that a file is whole."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import platformdirs
from filelock import FileLock

from lookahead_agent.errors import ConfigurationError, DiskSpaceError
from lookahead_agent.progress import Advance

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "LOOKAHEAD_AGENT_CACHE"
GGUF = "model.gguf"
"""Weights in the folder of a model that came as packages; its configuration and tokenizer are beside them."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_INDEX = "model.safetensors.index.json"
_JSON = (
    "config.json",
    _INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
"""Files that a model is loaded from besides weights: JSON objects."""
_READ_WHOLE = 1 << 20
"""Bytes of a JSON file that is parsed to check it."""
_LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors file's header, as its own library bounds them."""


def cache_dir() -> Path:
    """Folder of fetched models: `$LOOKAHEAD_AGENT_CACHE`, else `lookahead-agent` in the user's cache folder.

    Raises:
        ConfigurationError: The user has no home folder, and the variable is not set.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    return user_folder(
        lambda: chosen or platformdirs.user_cache_dir("lookahead-agent"),
        f"set {CACHE_VARIABLE} to a folder that may be written",
    )


def user_folder(find: Callable[[], str], advice: str) -> Path:
    """A folder of this user.

    Args:
        find: Tells which.
        advice: What to do where it cannot be told.

    Raises:
        ConfigurationError: It depends on a home folder, and there is none.
    """
    try:
        return Path(find()).expanduser()
    except RuntimeError:
        raise ConfigurationError(f"there is no home folder: {advice}") from None


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


def _no_weights_or_damage(folder: Path) -> str | None:
    return damage(folder, weights="wanted")


def made_once(
    folder: Path, make: Callable[[Path], None], check: Callable[[Path], str | None] = _no_weights_or_damage
) -> Path:
    """Return a model's folder that appears under its name by one rename, once it is complete; one process makes it.

    Args:
        folder: The folder; returned at once if it is there and not damaged, else made anew.
        make: Fills the empty folder that it is given; what it leaves when it fails is removed.
        check: Says how a folder is damaged; None if it is whole.

    Raises:
        DiskSpaceError: The disk is full.
        ConfigurationError: The folder's place cannot be written.
    """
    if folder.is_dir() and check(folder) is None:
        return folder
    root = folder.parent
    with _writing_to_cache(root):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            if folder.is_dir():
                if (damaged := check(folder)) is None:  # another process made it while this one waited
                    return folder
                logger.warning("%s is damaged (%s) and is made anew", folder, damaged)
                shutil.rmtree(folder)
            for leftover in root.glob(f"{folder.name}.unfinished-*"):
                shutil.rmtree(leftover)
            unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.unfinished-", dir=root))
            try:
                make(unfinished)
                unfinished.chmod(0o755)
                _to_disk(unfinished)
                os.replace(unfinished, folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _to_disk(folder: Path) -> None:
    """Have the system write all files of a folder now, so that no power cut leaves zeros in them after the rename."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _writing_to_cache(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
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
    """The damage to a model's files that shows without reading its weights; None if there is none.

    Args:
        folder: The model's.
        weights: Whether a folder without them is damaged, too, or none is looked at.
    """
    texts = [folder / name for name in _JSON if (folder / name).exists()]
    if (wrong := next((problem for file in texts if (problem := _wrong_json(file)) is not None), None)) is not None:
        return wrong
    if weights == "ignored":
        return None
    index = folder / _INDEX
    named = json.loads(index.read_text(encoding="utf-8")).get("weight_map") if index.is_file() else None
    files = [folder / name for name in set(named.values())] if isinstance(named, dict) else folder.glob("*.safetensors")
    parts = sorted(files)
    gguf = folder / GGUF
    if weights == "wanted" and not parts and not gguf.is_file():
        return "there are no weights"
    if (parts or gguf.is_file()) and not (folder / "config.json").is_file():
        return "config.json is missing"
    if gguf.is_file():
        with gguf.open("rb") as content:
            if content.read(4) != b"GGUF":
                return f"{GGUF} is no GGUF file"
    return next((problem for part in parts if (problem := _wrong_weights(part)) is not None), None)


def _wrong_json(file: Path) -> str | None:
    try:
        if file.stat().st_size <= _READ_WHOLE:
            whole = isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
            return None if whole else f"{file.name} is no JSON object"
        # A vocabulary's megabytes take long to parse: a file that is cut off or zeroed shows at its ends.
        with file.open("rb") as content:
            first = content.read(1024).lstrip()[:1]
            content.seek(-1024, os.SEEK_END)
            last = content.read().rstrip()[-1:]
        return None if first + last == b"{}" else f"{file.name} is cut off"
    except (OSError, ValueError) as error:
        return f"{file.name} cannot be read: {error}"


def _wrong_weights(file: Path) -> str | None:
    """The same of a safetensors file, whose header says how long it is."""
    try:
        size = file.stat().st_size
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if not 0 < length <= min(size - 8, _LONGEST_HEADER):
                return f"{file.name} has no header that can be read"
            header = json.loads(content.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return f"{file.name} has no header that can be read: {error}"
    return None if size == expected else f"{file.name} has {size} bytes in place of {expected}"


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
        raise ConfigurationError(f"{file} cannot be written: {error.strerror or error}") from error


def write_whole(file: Path, text: str) -> None:
    """Write a text file that is there whole or not at all, in place of the one before.

    Processes that write the same file wait for each other, and the next one takes over what a killed one has left. A
    lone surrogate is written as its escape. A device or a pipe is written to as it is.

    Raises:
        OSError: It cannot be written; the file before is still there.
    """
    file = Path(os.path.realpath(file))  # a link stays one
    content = text.encode(errors="backslashreplace")
    if file.exists() and not file.is_file():
        file.write_bytes(content)
        return
    unfinished = file.with_name(f"{file.name}.unfinished")
    while True:
        if unfinished.is_symlink():  # nobody else chooses what is overwritten
            unfinished.unlink(missing_ok=True)
        with os.fdopen(os.open(unfinished, _UNFINISHED, 0o666), "wb") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            try:
                still = os.path.samestat(os.fstat(out.fileno()), unfinished.stat())
            except FileNotFoundError:
                still = False
            if not still:
                continue  # whoever had it has finished it meanwhile
            try:
                out.truncate(0)
                out.write(content)
                out.flush()
                unfinished.replace(file)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
            return


_UNFINISHED = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def sha256_of(path: Path, advance: Advance | None = None) -> str:
    """Hex sha256 of a file; `advance` is told the bytes read so far."""
    digest = hashlib.sha256()
    read = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            read += len(chunk)
            if advance is not None:
                advance(read)
    return digest.hexdigest()
