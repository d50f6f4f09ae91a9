"""Read and write text files inside one folder, and nowhere else.

Links are not followed. Only regular files are opened, so that no read blocks. Writes are atomic. Names that programs of
the user run, and names of secrets, are refused. `lookahead_agent.sandbox.working_folder` implements this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import MAX_RESULT_LENGTH, make_tool, truncate
from lookahead_agent.sandbox import working_folder
from lookahead_agent.sandbox.protected_names import refuse_protected
from lookahead_agent.sandbox.working_folder import read_regular
from lookahead_agent.system.files import open_folder
from lookahead_agent.system.texts import check_encodable

_MAX_BYTES = 1 << 20
_LINE_END = re.compile(r"\r?\n|\r")


def read_text(
    root: Path,
    name: str,
    first_line: int = 1,
    lines: int = 200,
    first_character: int = 1,
    allow: Collection[str] = (),
) -> str:
    """Read some lines of a file, at most 50,000 characters.

    Args:
        root: The working folder.
        name: Path of the file inside it.
        first_line: Number of the first line, from 1.
        lines: Maximum number of lines.
        first_character: First character of the first line, from 1.
        allow: See `make_file_tools`.

    Returns:
        The lines with their line ends, and a note if there are more.

    Raises:
        ValueError: There is no such text file, it has no such line or character, its name is protected, it is outside
            or behind a link, it is too long, or it cannot be read now. The message says which.
    """
    refuse_protected(name, allow, writing=False)
    with working_folder.open_parent(root, name) as (parent, basename):
        try:
            data = read_regular(basename, _MAX_BYTES, parent)
        except IsADirectoryError:
            with open_folder(basename, parent) as descriptor:
                raise ValueError(f"{name!r} is a folder; it has {working_folder.describe_names(descriptor)}") from None
        except FileNotFoundError:
            raise ValueError(
                f"there is no file {name!r}; its folder has {working_folder.describe_names(parent)}"
            ) from None
        except OSError as error:
            raise ValueError(working_folder.refusal(name, error)) from None
        except ValueError as error:
            raise ValueError(f"{name!r} {error}") from None
    try:
        all_lines = re.findall(r"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+", data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{name!r} is not a text file") from None
    start = max(0, first_line - 1)
    skipped = max(0, first_character - 1)
    # Line ends stay as they are, so that a file can be written back unchanged.
    text = "".join(all_lines[start : start + lines])
    shown = text[skipped:]
    if start and not text:
        count = f"{len(all_lines)} line{'s' if len(all_lines) != 1 else ''}"
        raise ValueError(f"{name!r} has {count}: there is none from first_line={first_line} on")
    if skipped and not shown:
        raise ValueError(
            f"{name!r} has {len(text)} characters from first_line={start + 1} on: there is none from "
            f"first_character={first_character} on"
        )
    rest = len(all_lines) - start - lines
    notice = f"({rest} more lines)" if rest > 0 else ""
    if len(shown) + len(notice) <= MAX_RESULT_LENGTH:
        return shown + notice
    # 200 characters are reserved for the truncation notice.
    kept = shown[: MAX_RESULT_LENGTH - 200]
    ends = [match.end() for match in _LINE_END.finditer(shown, 0, len(kept))]
    line = start + len(ends) + 1
    character = len(kept) - ends[-1] + 1 if ends else skipped + len(kept) + 1
    return truncate(shown, f"read on from first_line={line}, first_character={character}", len(kept))


def write_text(root: Path, name: str, text: str, allow: Collection[str] = ()) -> str:
    """Write a file, replacing an existing one.

    If each line of the existing file ends with a carriage return and a line feed, or with a carriage return alone, and
    the text has no carriage return, the lines of the new file end so, too. Models write line feeds only.

    Args:
        root: The working folder.
        name: Path of the file inside it; missing folders are created.
        text: Content of the file.
        allow: See `make_file_tools`.

    Raises:
        ConfigurationError: The text has half a character.
        ValueError: The name is protected; the path is outside or behind a link, or names no regular file; the text is
            too long; or the file cannot be written now. The message says which.
    """
    check_encodable(text, "the text")
    data = text.encode()
    if len(data) > _MAX_BYTES:
        raise ValueError(f"the text is longer than {_MAX_BYTES} bytes")
    written = working_folder.replace_file(root, name, data, allow, keep_line_ends=True)
    return f"wrote {written} bytes to {name}"


def make_file_tools(root: str | Path, allow: Collection[str] = ()) -> tuple[BaseTool, BaseTool]:
    """Create the tools `read_file` and `write_file` for one folder.

    Args:
        root: The working folder.
        allow: Protected names of files and folders that the tools may use all the same, such as `Makefile` or
            `.github`; `*` stands for any characters. docs/reference/tools.md lists protected names.

    Raises:
        ValueError: The folder does not exist or cannot be opened.
    """
    base = Path(root)
    try:
        exists = base.is_dir()
    except OSError as error:
        raise ValueError(f"the folder {base.name} cannot be opened: {error.strerror}") from None
    if not exists:
        raise ValueError(f"there is no folder {base.name}")
    if not os.access(base, os.X_OK):
        raise ValueError(f"the folder {base.name} cannot be opened: check its permissions")

    @make_tool(rest="read from a later line", read_only=True)
    def read_file(name: str, first_line: int = 1, first_character: int = 1) -> str:
        """Read a text file of the working folder, up to 200 lines from a line (and a character of it) on."""
        return read_text(base, name, first_line, first_character=first_character, allow=allow)

    @make_tool(rest="the text is written", read_only=False)
    def write_file(name: str, text: str) -> str:
        """Write a text file in the working folder, in place of one of that name."""
        return write_text(base, name, text, allow)

    return read_file, write_file
