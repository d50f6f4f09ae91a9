"""Runs Python code that a model wrote, in a sandbox of the operating system.

The code has Python's standard library, numpy and pandas if they are installed, and an empty folder or a copy of the
files of one. It cannot reach the network, start programs, or see other files and the environment of the agent; its
time, memory, output and files are limited.
`lookahead_agent.sandbox` keeps it from the machine by bubblewrap or Landlock, whichever is there. Behind Landlock the
code can write no files. docs/reference/tools.md says what each keeps out.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import make_tool
from lookahead_agent.sandbox import Isolation, IsolationError, PythonLimits, choose, run_isolated
from lookahead_agent.sandbox.backends import package_files
from lookahead_agent.sandbox.working_folder import copies, printable

__all__ = ["Isolation", "IsolationError", "PythonLimits", "make_python_tool", "python", "run_python"]

_SHOWN = 20
_MISSING = re.compile(r"^ModuleNotFoundError.*: No module named '(\w+)", re.MULTILINE)
_USUAL_PACKAGES = ("numpy", "pandas")
"""Packages that models import, whatever they are told of the standard library."""


def run_python(
    code: str,
    limits: PythonLimits | None = None,
    isolation: Isolation = "auto",
    folder: str | Path | None = None,
    packages: Sequence[str] | None = None,
) -> str:
    """Run code and return what it prints.

    Args:
        code: Python.
        limits: What it may use.
        isolation: What stands between it and this machine; "none" is no sandbox at all, see `Isolation`.
        folder: The folder that it works in, see `make_python_tool`.
        packages: What it may import beside the standard library, see `make_python_tool`.

    Raises:
        ConfigurationError: One of the packages is not installed.
        ValueError: It failed, took too long or used too much; the message says which, and what it printed before.
        IsolationError: There is no such backend here, and the message says what to install; or no process could be
            started.
    """
    return _run(code, limits, isolation, None if folder is None else Path(folder), _importable(packages))


def make_python_tool(
    limits: PythonLimits | None = None,
    isolation: Isolation = "auto",
    folder: str | Path | None = None,
    packages: Sequence[str] | None = None,
) -> BaseTool:
    """A tool with limits and a sandbox of its own, whose description names the backend and the files.

    Args:
        limits: What a run may use.
        isolation: See `run_python`.
        folder: The folder of `make_file_tools`. The code gets a copy of its regular files, but of those whose names
            begin with a dot; what it changes is written back when it ends without an error. Behind "landlock" it
            reads the folder and writes nothing. None: it has an empty folder.
        packages: Names of installed packages that the code may import, with what they need; it can read their files.
            None: numpy and pandas, if they are installed.

    Raises:
        ConfigurationError: One of the packages is not installed.
        IsolationError: There is no such backend here; the message says what to install.
        ValueError: There is no such folder, or it has too many files for a copy.
    """
    base = None if folder is None else Path(folder)
    if base is not None and not base.is_dir():
        raise ValueError(f"there is no folder {base.name}")
    importable = _importable(packages)
    package_files(*importable)
    return _tool(limits, choose(isolation), base, importable)


def _importable(packages: Sequence[str] | None) -> tuple[str, ...]:
    if packages is not None:
        return tuple(packages)
    return tuple(name for name in _USUAL_PACKAGES if importlib.util.find_spec(name) is not None)


def _tool(
    limits: PythonLimits | None,
    isolation: Isolation,
    folder: Path | None = None,
    packages: Sequence[str] = (),
) -> BaseTool:
    unusual = {
        "auto": "There is nothing here to isolate it with.",
        "none": "It is not isolated.",
        "landlock": "It is isolated by landlock, and can write no files.",
    }
    kept = unusual.get(isolation, f"It is isolated by {isolation}.")
    sees = "It has no files: write the data into the code."
    if folder is not None:
        names = sorted(map(printable, copies(folder, (limits or PythonLimits()).files)))
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        sees = f"It works in the folder with the files {', '.join(names[:_SHOWN])}{more}: open them by these names."
        if not names:
            sees = "It works in the folder of the files, which is empty now."
    libraries = ", ".join(["standard library", *packages])
    description = (
        f"Run Python code ({libraries}; nothing else, no network) and return what it prints. Use print(). {sees} {kept}"
    )

    @make_tool(description=description, rest="print less", read_only=False)
    def python(code: str) -> str:
        return _run(code, limits, isolation, folder, packages) or "(nothing was printed: use print())"

    return python


def _run(
    code: str,
    limits: PythonLimits | None,
    isolation: Isolation,
    folder: Path | None,
    packages: Sequence[str],
) -> str:
    try:
        return run_isolated(code, limits, isolation, folder, packages)
    except ValueError as error:
        if (missing := _MISSING.search(str(error))) is None:
            raise
        # A model would install it next.
        there = ", ".join(["the standard library", *packages])
        instead = f"there is no {missing[1]} here, and nothing can be installed: use {there}"
        raise ValueError(f"{str(error).rstrip()}\n({instead})") from None


python: BaseTool
"""The tool with the usual limits and the strongest backend that there is; without one, calls say what to install."""


def __getattr__(name: str) -> BaseTool:
    # Made when it is first asked for: importing this file tries no backend.
    if name != "python":
        raise AttributeError(name)
    try:
        made = make_python_tool()
    except IsolationError:
        made = _tool(None, "auto")
    globals()["python"] = made
    return made
