"""Reads and writes text files inside one folder, and nowhere else.

Every part of a name is opened from the folder's own descriptor, and no link is followed: a folder that is swapped for a
link meanwhile changes nothing. Only regular files are opened, so none is waited for. A file is written beside the old
one and put in its place, so that it is there whole or not at all, and another name of the old one keeps what it had.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath

from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import LONGEST_RESULT, cut, make_tool
from lookahead_agent.sandbox import folders
from lookahead_agent.sandbox.folders import read_regular

_LARGEST = 1 << 20
_LONGEST_NAME = 4096
_SHOWN = 50
# Names of a folder that are looked at to show some of them.
_MOST_NAMES = 10_000


def read_text(root: Path, name: str, first_line: int = 1, lines: int = 200, first_character: int = 1) -> str:
    """Some lines of a file, at most 50,000 characters of them.

    Args:
        root: The folder.
        name: The file's name there.
        first_line: From which line, from 1.
        lines: How many at most.
        first_character: From which character of the first line, from 1.

    Raises:
        ValueError: There is no such text file, it is outside or behind a link, it is too long, or it cannot be read
            now; the message says which.
    """
    with _parent(root, name) as (parent, last):
        try:
            data = read_regular(last, _LARGEST, parent)
        except IsADirectoryError:
            with folders.open_folder(last, parent) as descriptor:
                raise ValueError(f"{name!r} is a folder; it has {_listing(descriptor)}") from None
        except FileNotFoundError:
            raise ValueError(f"there is no file {name!r}; its folder has {_listing(parent)}") from None
        except OSError as error:
            raise ValueError(_refused(name, error)) from None
        except ValueError as error:
            raise ValueError(f"{name!r} {error}") from None
    try:
        found = data.decode("utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{name!r} is not a text file") from None
    start = max(0, first_line - 1)
    left_out = max(0, first_character - 1)
    shown = "\n".join(found[start : start + lines])[left_out:]
    rest = len(found) - start - lines
    more = f"\n({rest} more lines)" if rest > 0 else ""
    if len(shown) + len(more) <= LONGEST_RESULT:
        return shown + more
    # Room for the line that says where to go on.
    kept = shown[: LONGEST_RESULT - 200]
    line = start + kept.count("\n") + 1
    character = len(kept) - kept.rfind("\n") if "\n" in kept else left_out + len(kept) + 1
    return cut(shown, f"read on from first_line={line}, first_character={character}", len(kept))


def write_text(root: Path, name: str, text: str) -> str:
    """Write a file, in place of one that is there.

    Args:
        root: The folder.
        name: The file's name there; folders in it are made.
        text: What it says.

    Raises:
        ValueError: It would be outside or behind a link, in place of something that is no file, is too long, or cannot
            be written now; the message says which.
    """
    data = text.encode(errors="replace")
    if len(data) > _LARGEST:
        raise ValueError(f"the text is longer than {_LARGEST} bytes")
    with _parent(root, name, make=True) as (parent, last):
        try:
            mode = _mode_of(parent, last, name)
            _replace(parent, last, data, mode)
        except OSError as error:
            raise ValueError(_refused(name, error)) from None
    return f"wrote {len(data)} bytes to {name}"


def make_file_tools(root: str | Path) -> tuple[BaseTool, BaseTool]:
    """The tools `read_file` and `write_file` for one folder.

    Raises:
        ValueError: There is no such folder.
    """
    base = Path(root)
    try:
        there = base.is_dir()
    except OSError as error:
        raise ValueError(f"the folder {base.name} cannot be opened: {error.strerror}") from None
    if not there:
        raise ValueError(f"there is no folder {base.name}")

    @make_tool(rest="read from a later line")
    def read_file(name: str, first_line: int = 1, first_character: int = 1) -> str:
        """Read a text file of the working folder, up to 200 lines from a line (and a character of it) on."""
        return read_text(base, name, first_line, first_character=first_character)

    @make_tool(rest="the text is written")
    def write_file(name: str, text: str) -> str:
        """Write a text file in the working folder, in place of one of that name."""
        return write_text(base, name, text)

    return read_file, write_file


@contextmanager
def _parent(root: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder that a file is in, and the file's own name there.

    Raises:
        ValueError: The name leads outside or over a link, or there is no such folder, or it cannot be opened now.
    """
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
    try:
        # The folder itself may be reached over a link: its maker chose it.
        current = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"the working folder cannot be opened: {error.strerror}") from None
    try:
        for part in parts[:-1]:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=current)
            below = os.open(part, folders.FLAGS, dir_fd=current)
            os.close(current)
            current = below
        yield current, parts[-1]
    except FileNotFoundError:
        raise ValueError(
            f"there is no file {name!r}; the last of its folders that is there has {_listing(current)}"
        ) from None
    except OSError as error:
        raise ValueError(_refused(name, error)) from None
    finally:
        os.close(current)


def _mode_of(parent: int, name: str, asked: str) -> int:
    """The permissions of the file that is replaced, or of a new one."""
    try:
        there = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return 0o644
    if stat.S_ISDIR(there.st_mode):
        raise ValueError(f"{asked!r} is a folder")
    if stat.S_ISLNK(there.st_mode):
        raise ValueError(f"{asked!r} is a link, and may lead outside: links are not followed")
    if not stat.S_ISREG(there.st_mode):
        raise ValueError(f"{asked!r} is no regular file")
    return stat.S_IMODE(there.st_mode)


def _replace(parent: int, name: str, data: bytes, mode: int) -> None:
    new = f".{secrets.token_hex(8)}.new"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            # Without set-user-id and its like: the text is another's.
            os.fchmod(descriptor, mode & 0o777)
        os.replace(new, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(new, dir_fd=parent)
        raise


def _refused(name: str, error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return f"{name!r} leads over a link or a file, and may be outside: links are not followed"
    if error.errno == errno.ENXIO:
        return f"{name!r} is no regular file"
    return f"{name!r} cannot be opened or written: {error.strerror}"


def _listing(folder: int) -> str:
    """Some names of a folder. Those with line breaks and the like are quoted, so that none looks like two."""
    try:
        with os.scandir(folder) as entries:
            names = [
                (entry.name if entry.name.isprintable() else ascii(entry.name))
                + ("/" if entry.is_dir(follow_symlinks=False) else "")
                for entry in islice(entries, _MOST_NAMES)
            ]
    except OSError as error:
        return f"names that cannot be listed: {error.strerror}"
    more = f", and {len(names) - _SHOWN}{' or' if len(names) == _MOST_NAMES else ''} more"
    return ", ".join(sorted(names)[:_SHOWN]) + (more if len(names) > _SHOWN else "") or "nothing in it"
