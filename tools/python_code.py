"""Run Python code that a model wrote, in a sandbox of the operating system.

The code has Python's standard library, numpy and pandas if they are installed, and an empty folder or a copy of a
folder's files. It cannot reach the network, start programs, or see other files and the agent's environment. Its time,
memory, output and files are limited.
`lookahead_agent.sandbox` isolates it with bubblewrap or Landlock, whichever works. Under Landlock the code can write no
files. docs/reference/tools.md lists what each backend blocks.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import make_tool
from lookahead_agent.sandbox import Isolation, IsolationError, PythonLimits, choose, run_isolated
from lookahead_agent.sandbox.backends import package_files
from lookahead_agent.sandbox.working_folder import copy_files, printable

__all__ = ["Isolation", "IsolationError", "PythonLimits", "make_python_tool", "python", "run_python"]

_SHOWN = 20
_MISSING = re.compile(r"^ModuleNotFoundError.*: No module named '(\w+)", re.MULTILINE)
_DEFAULT_PACKAGES = ("numpy", "pandas")
"""Packages that models import even when a prompt allows the standard library only."""


def run_python(
    code: str,
    limits: PythonLimits | None = None,
    isolation: Isolation = "auto",
    folder: str | Path | None = None,
    packages: Sequence[str] | None = None,
    allow: Collection[str] = (),
) -> str:
    """Run code and return its output.

    Args:
        code: Python.
        limits: Limits of the run.
        isolation: The sandbox backend; "none" is not a sandbox at all, see `Isolation`.
        folder: The folder that the code works in, see `make_python_tool`.
        packages: Packages that the code may import besides the standard library, see `make_python_tool`.
        allow: Protected names that the code may use, see `make_python_tool`.

    Raises:
        ConfigurationError: A package is not installed, or the code has half a character.
        ValueError: The code failed, took too long or used too much. The message says which, with the output so far.
        IsolationError: No such backend works here, and the message says what to install; or no process could be
            started.
    """
    return _run(code, limits, isolation, None if folder is None else Path(folder), _importable(packages), allow)


def make_python_tool(
    limits: PythonLimits | None = None,
    isolation: Isolation = "auto",
    folder: str | Path | None = None,
    packages: Sequence[str] | None = None,
    allow: Collection[str] = (),
) -> BaseTool:
    """Create a tool with limits and a sandbox of its own, whose description names the backend and the files.

    Args:
        limits: Limits of each run.
        isolation: See `run_python`.
        folder: The folder of `make_file_tools`. The code gets a copy of its regular files, without secrets. Changes
            are written back if the code ends without an error, except those of protected names. Under "landlock" the
            code writes nothing. None: an empty folder.
        packages: Names of installed packages that the code may import, with their dependencies; it can read their
            files. None: numpy and pandas, if they are installed.
        allow: Protected names that the code may use all the same, see `make_file_tools`.

    Raises:
        ConfigurationError: A package is not installed.
        IsolationError: No such backend works here; the message says what to install.
        ValueError: The folder does not exist, or is too large to copy.
    """
    base = None if folder is None else Path(folder)
    if base is not None and not base.is_dir():
        raise ValueError(f"there is no folder {base.name}")
    importable = _importable(packages)
    package_files(*importable)
    return _tool(limits, choose(isolation), base, importable, allow)


def _importable(packages: Sequence[str] | None) -> tuple[str, ...]:
    if packages is not None:
        return tuple(packages)
    return tuple(name for name in _DEFAULT_PACKAGES if importlib.util.find_spec(name) is not None)


def _tool(
    limits: PythonLimits | None,
    isolation: Isolation,
    folder: Path | None = None,
    packages: Sequence[str] = (),
    allow: Collection[str] = (),
) -> BaseTool:
    isolation_notes = {
        "auto": "There is nothing here to isolate it with.",
        "none": "It is not isolated.",
        "landlock": "It is isolated by landlock, and can write no files.",
    }
    note = isolation_notes.get(isolation, f"It is isolated by {isolation}.")
    files = "It has no files: write the data into the code."
    if folder is not None:
        names = sorted(map(printable, copy_files(folder, (limits or PythonLimits()).files, allow)))
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        files = f"It works in the folder with the files {', '.join(names[:_SHOWN])}{more}: open them by these names."
        if not names:
            files = "It works in the folder of the files, which is empty now."
    imports = ", ".join(["standard library", *packages])
    description = (
        f"Run Python code ({imports}; nothing else, no network) and return what it prints. Use print(). {files} {note}"
    )

    @make_tool(description=description, rest="print less", read_only=False)
    def python(code: str) -> str:
        return _run(code, limits, isolation, folder, packages, allow) or "(nothing was printed: use print())"

    return python


def _run(
    code: str,
    limits: PythonLimits | None,
    isolation: Isolation,
    folder: Path | None,
    packages: Sequence[str],
    allow: Collection[str],
) -> str:
    try:
        return run_isolated(code, limits, isolation, folder, packages, allow)
    except ValueError as error:
        if (missing := _MISSING.search(str(error))) is None:
            raise
        # Without this hint, a model tries to install the package.
        available = ", ".join(["the standard library", *packages])
        hint = f"there is no {missing[1]} here, and nothing can be installed: use {available}"
        raise ValueError(f"{str(error).rstrip()}\n({hint})") from None


python: BaseTool
"""The tool with default limits and the strongest backend that works; without one, calls say what to install."""


def __getattr__(name: str) -> BaseTool:
    # Created on first access, so that importing this file starts no sandbox.
    if name != "python":
        raise AttributeError(name)
    try:
        created = make_python_tool()
    except IsolationError:
        created = _tool(None, "auto")
    globals()["python"] = created
    return created
