"""Reads and writes text files inside one folder, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

from langchain_core.tools import BaseTool, ToolException, tool

_LARGEST = 1 << 20


def inside(root: Path, name: str) -> Path:
    """The path of a file in `root`, by its name there.

    Raises:
        ValueError: It would be outside, also by way of a link.
    """
    if not name.strip() or "\0" in name:
        raise ValueError("the file needs a name")
    base = root.resolve()
    path = (base / name).resolve()
    if path == base or not path.is_relative_to(base):
        raise ValueError(f"{name!r} is outside of the folder: only names inside it are possible")
    return path


def read_text(root: Path, name: str, first_line: int = 1, lines: int = 200) -> str:
    """Some lines of a file.

    Args:
        root: The folder.
        name: The file's name there.
        first_line: From which line, from 1.
        lines: How many at most.

    Raises:
        ValueError: There is no such text file, or it is outside.
    """
    path = inside(root, name)
    if path.is_dir():
        raise ValueError(f"{name!r} is a folder; it has {_listing(path)}")
    if not path.is_file():
        raise ValueError(f"there is no file {name!r}; the folder has {_listing(root)}")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{name!r} is longer than {_LARGEST} bytes")
    try:
        found = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{name!r} is not a text file") from None
    shown = found[max(0, first_line - 1) : max(0, first_line - 1) + lines]
    rest = len(found) - max(0, first_line - 1) - len(shown)
    return "\n".join(shown) + (f"\n({rest} more lines)" if rest > 0 else "")


def write_text(root: Path, name: str, text: str) -> str:
    """Write a file, in place of one that is there.

    Args:
        root: The folder.
        name: The file's name there; folders in it are made.
        text: What it says.

    Raises:
        ValueError: It would be outside, or is too long.
    """
    path = inside(root, name)
    data = text.encode()
    if len(data) > _LARGEST:
        raise ValueError(f"the text is longer than {_LARGEST} bytes")
    if path.is_dir():
        raise ValueError(f"{name!r} is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link that was put there meanwhile is not followed.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ValueError(f"{name!r} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return f"wrote {len(data)} bytes to {name}"


def make_file_tools(root: str | Path) -> tuple[BaseTool, BaseTool]:
    """The tools `read_file` and `write_file` for one folder.

    Raises:
        ValueError: There is no such folder.
    """
    base = Path(root)
    if not base.is_dir():
        raise ValueError(f"there is no folder {base.name}")

    @tool
    def read_file(name: str, first_line: int = 1) -> str:
        """Read a text file of the working folder, up to 200 lines from a line on."""
        try:
            return read_text(base, name, first_line)
        except ValueError as error:
            raise ToolException(str(error)) from error

    @tool
    def write_file(name: str, text: str) -> str:
        """Write a text file in the working folder, in place of one of that name."""
        try:
            return write_text(base, name, text)
        except ValueError as error:
            raise ToolException(str(error)) from error

    read_file.handle_tool_error = write_file.handle_tool_error = True
    return read_file, write_file


def _listing(folder: Path) -> str:
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    return ", ".join(names[:50]) or "nothing in it"
