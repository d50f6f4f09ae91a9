"""Reads and writes text files inside one folder, and nowhere else.

No link is followed, and only regular files are opened, so none is waited for. A file is written whole or not at all.
`lookahead_agent.sandbox.working_folder` says how.
"""

from __future__ import annotations

from pathlib import Path

from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import LONGEST_RESULT, cut, make_tool
from lookahead_agent.sandbox import working_folder
from lookahead_agent.sandbox.working_folder import read_regular

_LARGEST = 1 << 20


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
    with working_folder.open_parent(root, name) as (parent, last):
        try:
            data = read_regular(last, _LARGEST, parent)
        except IsADirectoryError:
            with working_folder.open_folder(last, parent) as descriptor:
                raise ValueError(f"{name!r} is a folder; it has {working_folder.listing(descriptor)}") from None
        except FileNotFoundError:
            raise ValueError(f"there is no file {name!r}; its folder has {working_folder.listing(parent)}") from None
        except OSError as error:
            raise ValueError(working_folder.refusal(name, error)) from None
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
    working_folder.replace_file(root, name, data)
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

    @make_tool(rest="read from a later line", read_only=True)
    def read_file(name: str, first_line: int = 1, first_character: int = 1) -> str:
        """Read a text file of the working folder, up to 200 lines from a line (and a character of it) on."""
        return read_text(base, name, first_line, first_character=first_character)

    @make_tool(rest="the text is written", read_only=False)
    def write_file(name: str, text: str) -> str:
        """Write a text file in the working folder, in place of one of that name."""
        return write_text(base, name, text)

    return read_file, write_file
