"""An agent's working folder: opens and replaces its files, and copies them into and out of a sandbox.

Each part of a path is opened from the folder's descriptor, and links are not followed. Swapping a folder for a link
meanwhile has no effect. Writes are atomic, and other hard links of a replaced file keep its content.
`protected_names` lists the names that are refused.
"""

import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from lookahead_agent.sandbox.protected_names import protection, refuse_protected
from lookahead_agent.system.files import FOLDER_FLAGS, open_folder

_MAX_NAME_LENGTH = 4096
_SHOWN = 50
# Names that are read from a folder to show some of them.
_MAX_NAMES = 10_000
# Bytes of a file whose line ends are kept.
_MAX_LINES_BYTES = 4 << 20
_MAX_COPIES = 2_000
_PAGE = 4096
# Bytes of a line of the report: a name of `_MAX_NAME_LENGTH` characters as JSON escapes, and its size.
_MAX_LINE = 12 * _MAX_NAME_LENGTH + 100
if hasattr(os, "O_DIRECTORY"):  # Windows opens no file relative to a folder
    # Without O_NONBLOCK, opening a FIFO would wait for a process at its other end.
    _FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def read_regular(path: str | Path, limit: int, folder: int | None = None) -> bytes:
    """Read a regular file, relative to a folder's descriptor if given, without following links or blocking.

    Raises OSError; or ValueError if it is longer than `limit` bytes or not regular. The message continues the name.
    """
    descriptor = os.open(path, _FILE_FLAGS, dir_fd=folder)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("is not a regular file")
            data = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise ValueError(f"is longer than {limit} bytes")
    return data


@contextmanager
def open_parent(root: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open a file's folder, which `make` creates; yield the descriptor and the file's own name. Raises ValueError."""
    if not name.strip() or "\0" in name:
        raise ValueError("the file needs a name")
    if len(name) > _MAX_NAME_LENGTH:
        raise ValueError(f"the name is longer than {_MAX_NAME_LENGTH} characters")
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or parts[0].startswith("/"):
        raise ValueError(f"{name!r} is outside of the folder: only names inside it are possible, without '..'")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} has a lone surrogate, which no file's name can have") from None
    current = _open_root(root)
    try:
        for part in parts[:-1]:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=current)
            below = os.open(part, FOLDER_FLAGS, dir_fd=current)
            os.close(current)
            current = below
        yield current, parts[-1]
    except FileNotFoundError:
        raise ValueError(
            f"there is no file {name!r}; the last of its folders that is there has {describe_names(current)}"
        ) from None
    except OSError as error:
        raise ValueError(refusal(name, error)) from None
    finally:
        os.close(current)


def _open_root(root: Path) -> int:
    """Open the working folder, which may itself be behind a link: its creator chose it."""
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"the working folder cannot be opened: {error.strerror}") from None


def replace_file(root: Path, name: str, data: bytes, allow: Iterable[str] = (), *, keep_line_ends: bool = False) -> int:
    """Write a file into a working folder, replacing an existing one, and create its folders. Returns its size.

    With `keep_line_ends`, the line feeds of a text without carriage returns become the line ends of the existing file,
    if that has one kind of them.
    Raises ValueError, also for a protected name that `allow` does not have.
    """
    refuse_protected(name, allow, writing=True)
    with open_parent(root, name, make=True) as (parent, basename):
        mode = _mode_of(parent, basename, name)
        if keep_line_ends and b"\r" not in data:
            data = data.replace(b"\n", _line_end(parent, basename))
        new = f".{secrets.token_hex(8)}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(new, flags, 0o600, dir_fd=parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                # The mode has no set-user-id and similar bits: the content is another's.
                os.fchmod(descriptor, mode & 0o777)
            os.replace(new, basename, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=parent)
            raise
        return len(data)


def _line_end(folder: int, name: str) -> bytes:
    """Return the line end of a file that has one kind: of Windows, or of old Macs; else a line feed."""
    try:
        old = read_regular(name, _MAX_LINES_BYTES, folder)
    except (OSError, ValueError):  # there is none, or none that can be read
        return b"\n"
    feeds, pairs, returns = (old.count(end) for end in (b"\n", b"\r\n", b"\r"))
    if pairs and feeds == pairs:
        return b"\r\n"
    return b"\r" if returns and not feeds else b"\n"


def _mode_of(parent: int, name: str, requested: str) -> int:
    """Return the permissions of the replaced file, or of a new one."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0o644
    if stat.S_ISREG(mode):
        return stat.S_IMODE(mode)
    link = "a link, and may lead outside: links are not followed"
    raise ValueError(
        f"{requested!r} is {'a folder' if stat.S_ISDIR(mode) else link if stat.S_ISLNK(mode) else 'not a regular file'}"
    )


def refusal(name: str, error: OSError) -> str:
    """Say why a file cannot be opened or written."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return f"{name!r} leads over a link or a file, and may be outside: links are not followed"
    if error.errno == errno.ENXIO:
        return f"{name!r} is not a regular file"
    return f"{name!r} cannot be opened or written: {error.strerror}"


def describe_names(folder: int) -> str:
    """List some names of a folder by its descriptor; names with line breaks are quoted, so that none looks like two."""
    try:
        with os.scandir(folder) as entries:
            names = [
                printable(entry.name) + ("/" if entry.is_dir(follow_symlinks=False) else "")
                for entry in islice(entries, _MAX_NAMES)
            ]
    except OSError as error:
        return f"names that cannot be listed: {error.strerror}"
    more = f", and {len(names) - _SHOWN}{' or' if len(names) == _MAX_NAMES else ''} more"
    return ", ".join(sorted(names)[:_SHOWN]) + (more if len(names) > _SHOWN else "") or "nothing in it"


def printable(name: str) -> str:
    """Format a file's name on one line that a message can carry."""
    return name if name.isprintable() else ascii(name)


def copy_files(root: Path, limit: int, allow: Collection[str] = ()) -> dict[str, bytes]:
    """Read a folder's regular files by name, at most `limit` bytes, without links and names of secrets."""
    found: dict[str, bytes] = {}
    room, pending = limit, ["."]
    base = _open_root(root)
    try:
        while pending:
            folder = pending.pop()
            # Files and folders that cannot be opened are skipped.
            with suppress(OSError), open_folder(folder, base) as descriptor, os.scandir(descriptor) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if protection(entry.name, allow, writing=False) is not None:
                        continue
                    name = f"{folder}/{entry.name}".removeprefix("./")
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(name)
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    if entry.stat(follow_symlinks=False).st_size > room or len(found) == _MAX_COPIES:
                        large = f"the working folder {root.name} has more than {limit} bytes or {_MAX_COPIES} files"
                        then = "choose a smaller folder, or raise PythonLimits.files"
                        raise ValueError(f"{large}, and code works on a copy of them: {then}")
                    with suppress(OSError):
                        found[name] = read_regular(entry.name, room, descriptor)
                        room -= len(found[name])
    finally:
        os.close(base)
    return found


def disk_space(files: Mapping[str, bytes]) -> int:
    """Return the bytes that copies take on a disk or in memory, their folders included."""
    nested = {parent for name in files for parent in PurePosixPath(name).parents}
    return sum(-(-len(data) // _PAGE) * _PAGE for data in files.values()) + _PAGE * (len(files) + len(nested))


def pack_code(code: bytes, files: Mapping[str, bytes]) -> bytes:
    """Return the code and the copies in the format that the worker reads: a line of JSON, and the bytes."""
    header = {"code": len(code), "files": [(name, len(data)) for name, data in files.items()]}
    return b"".join([json.dumps(header).encode(), b"\n", code, *files.values()])


@dataclass(frozen=True)
class ChangeLimits:
    """Limits of the changes that `save_changes` applies: files with their folders, their bytes, and seconds."""

    files: int
    size: int
    seconds: float


def save_changes(
    root: Path, before: Mapping[str, bytes], changes: bytes, limits: ChangeLimits, allow: Collection[str] = ()
) -> str:
    """Apply the code's changes of its copies to the folder. Returns a line that names the files, or "".

    Files of protected names are left out, and the line names them.

    Raises:
        ValueError: The changes exceed a limit, or a file cannot be written. Files before it stay written.
    """
    # The code may have forged the report, so everything in it is counted and checked here.
    end = time.monotonic() + limits.seconds
    written, reported = _unpack(changes, before, limits)
    removed = [name for name in dict.fromkeys(reported) if name in before and name not in written]
    refused = {name for name in [*written, *removed] if protection(name, allow, writing=True) is not None}
    saved = {"wrote": list[str](), "removed": list[str]()}
    for name in [*written, *removed]:
        if name in refused:
            continue
        if time.monotonic() > end:
            raise ValueError(f"saving the changes took more than {limits.seconds:g} s; {_summary(saved, refused)}")
        if name in written:
            replace_file(root, name, written[name], allow)
            saved["wrote"].append(name)
        else:
            with open_parent(root, name) as (parent, basename), suppress(FileNotFoundError):
                os.unlink(basename, dir_fd=parent)
            saved["removed"].append(name)
    summary = _summary(saved, refused)
    return f"({summary})" if summary else ""


def _summary(saved: Mapping[str, list[str]], refused: Iterable[str]) -> str:
    parts = {**saved, "not saved, because their names are protected:": sorted(refused)}
    return "; ".join(f"{verb} {_list_names(names)}" for verb, names in parts.items() if names)


def _list_names(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more


def _unpack(changes: bytes, before: Iterable[str], limits: ChangeLimits) -> tuple[dict[str, bytes], list[str]]:
    """Parse the report into written files and removed names; both empty if it is incomplete."""
    written: dict[str, bytes] = {}
    folders = {"", "/"}
    position = records = size = 0
    # No line is longer than the last one, with the names of all copies.
    longest_line = _MAX_LINE + sum(len(json.dumps(name)) + 2 for name in before)
    while (end := changes.find(b"\n", position, position + longest_line)) >= 0:
        try:
            record: Any = json.loads(changes[position:end])
        except (ValueError, RecursionError):
            break
        match record:
            case {"name": str(name), "size": int(length)} if 0 <= length <= len(changes) - end - 1:
                records, size, parent = records + 1, size + length, os.path.dirname(name)
                while parent not in folders and len(folders) <= limits.files:
                    folders.add(parent)
                    parent = os.path.dirname(parent)
                if records + len(folders) - 2 > limits.files:
                    raise ValueError(f"the code wrote more than {limits.files} files and folders, and changed no file")
                if size > limits.size:
                    raise ValueError(f"the code wrote more than {limits.size} bytes, and changed no file")
                written[name] = changes[end + 1 : end + 1 + length]
                position = end + 1 + length
            case {"removed": [*names]} if all(isinstance(name, str) for name in names):
                return written, names
            case _:
                break
    return {}, []
