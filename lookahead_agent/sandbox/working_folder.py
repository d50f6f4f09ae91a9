"""The folder that an agent works in: opens and replaces its files, and takes a copy of them in and out of a sandbox.

Every part of a name is opened from the folder's own descriptor, and no link is followed: a folder that is swapped for a
link meanwhile changes nothing. A file is there whole or not at all, and another name of the old one keeps what it had.
"""

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

_LONGEST_NAME = 4096
_SHOWN = 50
# Names of a folder that are looked at to show some of them.
_MOST_NAMES = 10_000
_MOST_COPIES = 2_000
_PAGE = 4096
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a fifo would wait for a process at its other end.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


@contextmanager
def open_folder(name: str | Path, base: int | None = None) -> Iterator[int]:
    """A descriptor of a folder that is no link, below that of another descriptor if one is given; or OSError."""
    descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=base)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: str | Path, most: int, folder: int | None = None) -> bytes:
    """The bytes of a regular file below a folder's descriptor; no link is followed, no other process waited for.

    Raises OSError, or ValueError if it is longer than `most` bytes, or no such file; the message goes on from its name.
    """
    descriptor = os.open(path, _FILE_FLAGS, dir_fd=folder)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("is no regular file")
            data = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise ValueError(f"is longer than {most} bytes")
    return data


@contextmanager
def open_parent(root: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder that a file is in, which `make` makes, and its own name there; or ValueError."""
    if not name.strip() or "\0" in name:
        raise ValueError("the file needs a name")
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"the name is longer than {_LONGEST_NAME} characters")
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or parts[0].startswith("/"):
        raise ValueError(f"{name!r} is outside of the folder: only names inside it are possible, without '..'")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} has a lone surrogate, which no file's name can have") from None
    current = _opened(root)
    try:
        for part in parts[:-1]:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=current)
            below = os.open(part, _FOLDER_FLAGS, dir_fd=current)
            os.close(current)
            current = below
        yield current, parts[-1]
    except FileNotFoundError:
        raise ValueError(
            f"there is no file {name!r}; the last of its folders that is there has {listing(current)}"
        ) from None
    except OSError as error:
        raise ValueError(refusal(name, error)) from None
    finally:
        os.close(current)


def _opened(root: Path) -> int:
    """The working folder itself may be reached over a link: its maker chose it."""
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"the working folder cannot be opened: {error.strerror}") from None


def replace_file(root: Path, name: str, data: bytes) -> None:
    """Write a file into a working folder, in place of one that is there, and make its folders; or ValueError."""
    with open_parent(root, name, make=True) as (parent, last):
        mode = _mode_of(parent, last, name)
        new = f".{secrets.token_hex(8)}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(new, flags, 0o600, dir_fd=parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                # Without set-user-id and its like: the text is another's.
                os.fchmod(descriptor, mode & 0o777)
            os.replace(new, last, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=parent)
            raise


def _mode_of(parent: int, name: str, asked: str) -> int:
    """The permissions of the file that is replaced, or of a new one."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0o644
    if stat.S_ISREG(mode):
        return stat.S_IMODE(mode)
    link = "a link, and may lead outside: links are not followed"
    raise ValueError(
        f"{asked!r} is {'a folder' if stat.S_ISDIR(mode) else link if stat.S_ISLNK(mode) else 'no regular file'}"
    )


def refusal(name: str, error: OSError) -> str:
    """Why a file cannot be opened or written."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return f"{name!r} leads over a link or a file, and may be outside: links are not followed"
    if error.errno == errno.ENXIO:
        return f"{name!r} is no regular file"
    return f"{name!r} cannot be opened or written: {error.strerror}"


def listing(folder: int) -> str:
    """Some names of a folder, by its descriptor. Those with line breaks are quoted, so that none looks like two."""
    try:
        with os.scandir(folder) as entries:
            names = [
                printable(entry.name) + ("/" if entry.is_dir(follow_symlinks=False) else "")
                for entry in islice(entries, _MOST_NAMES)
            ]
    except OSError as error:
        return f"names that cannot be listed: {error.strerror}"
    more = f", and {len(names) - _SHOWN}{' or' if len(names) == _MOST_NAMES else ''} more"
    return ", ".join(sorted(names)[:_SHOWN]) + (more if len(names) > _SHOWN else "") or "nothing in it"


def printable(name: str) -> str:
    """A file's name in one line that a message can carry."""
    return name if name.isprintable() else ascii(name)


def copies(root: Path, most: int) -> dict[str, bytes]:
    """The regular files of a folder by name, at most `most` bytes, without links and names that begin with a dot."""
    found: dict[str, bytes] = {}
    room, left = most, ["."]
    base = _opened(root)
    try:
        while left:
            folder = left.pop()
            # What cannot be opened now, by this user or at all, is not copied.
            with suppress(OSError), open_folder(folder, base) as descriptor, os.scandir(descriptor) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.startswith("."):
                        continue
                    name = f"{folder}/{entry.name}".removeprefix("./")
                    if entry.is_dir(follow_symlinks=False):
                        left.append(name)
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    if entry.stat(follow_symlinks=False).st_size > room or len(found) == _MOST_COPIES:
                        large = f"the working folder {root.name} has more than {most} bytes or {_MOST_COPIES} files"
                        then = "choose a smaller folder, or raise PythonLimits.files"
                        raise ValueError(f"{large}, and code works on a copy of them: {then}")
                    with suppress(OSError):
                        found[name] = read_regular(entry.name, room, descriptor)
                        room -= len(found[name])
    finally:
        os.close(base)
    return found


def space(files: Mapping[str, bytes]) -> int:
    """Bytes that copies take on a disk or in memory, their folders included."""
    nested = {parent for name in files for parent in PurePosixPath(name).parents}
    return sum(-(-len(data) // _PAGE) * _PAGE for data in files.values()) + _PAGE * (len(files) + len(nested))


def packed(code: bytes, files: Mapping[str, bytes]) -> bytes:
    """The code and the copies as the sandbox's worker reads them: a line of JSON, and the bytes."""
    header = {"code": len(code), "files": [(name, len(data)) for name, data in files.items()]}
    return b"".join([json.dumps(header).encode(), b"\n", code, *files.values()])


def save_changes(root: Path, before: Mapping[str, bytes], changes: bytes) -> str:
    """Carry out in a folder what code has changed in its copies, and return a line that names the files, or ""."""
    # Code may have forged the report of the changes, so that it is held to the rules of `replace_file`, and raises what
    # that raises; the files before are written.
    written, removed = _unpacked(changes)
    for name, data in written.items():
        replace_file(root, name, data)
    gone = [name for name in removed if name in before and name not in written]
    for name in gone:
        with open_parent(root, name) as (parent, last), suppress(FileNotFoundError):
            os.unlink(last, dir_fd=parent)
    changed = {"wrote": written, "removed": gone}
    said = "; ".join(f"{verb} {', '.join(map(printable, names))}" for verb, names in changed.items() if names)
    return f"({said})" if said else ""


def _unpacked(changes: bytes) -> tuple[dict[str, bytes], list[str]]:
    """The files that were written, and the names that are gone, without a dot; nothing of a report without an end."""
    written: dict[str, bytes] = {}
    place = 0
    while (end := changes.find(b"\n", place)) >= 0:
        try:
            record: Any = json.loads(changes[place:end])
        except (ValueError, RecursionError):
            break
        match record:
            case {"name": str(name), "size": int(size)} if 0 <= size <= len(changes) - end - 1:
                if not any(part.startswith(".") and part != ".." for part in PurePosixPath(name).parts):
                    written[name] = changes[end + 1 : end + 1 + size]
                place = end + 1 + size
            case {"removed": [*names]} if all(isinstance(name, str) for name in names):
                return written, names
            case _:
                break
    return {}, []
