"""Runs Python code that a model wrote, in a sandbox of the operating system.

The code has Python's standard library, and an empty folder or a copy of the files of one. It cannot reach the network,
start programs, or see other files and the environment of the agent; its time, memory, output and files are limited.
`lookahead_agent.sandbox` keeps it from the machine by bubblewrap or Landlock, whichever is there. Behind Landlock the
code can write no files. docs/reference/tools.md says what each keeps out.
"""

from __future__ import annotations

from pathlib import Path

from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import make_tool
from lookahead_agent.sandbox import Isolation, IsolationError, PythonLimits, choose, run_isolated
from lookahead_agent.sandbox.working_folder import copies, printable

__all__ = ["Isolation", "IsolationError", "PythonLimits", "make_python_tool", "python", "run_python"]

_SHOWN = 20


def run_python(
    code: str, limits: PythonLimits | None = None, isolation: Isolation = "auto", folder: str | Path | None = None
) -> str:
    """Run code and return what it prints.

    Args:
        code: Python.
        limits: What it may use.
        isolation: What stands between it and this machine; "none" is no sandbox at all, see `Isolation`.
        folder: The folder that it works in, see `make_python_tool`.

    Raises:
        ValueError: It failed, took too long or used too much; the message says which, and what it printed before.
        IsolationError: There is no such backend here, and the message says what to install; or no process could be
            started.
    """
    return run_isolated(code, limits, isolation, folder=None if folder is None else Path(folder))


def make_python_tool(
    limits: PythonLimits | None = None,
    isolation: Isolation = "auto",
    scratch: Path | None = None,
    folder: str | Path | None = None,
) -> BaseTool:
    """A tool with limits and a sandbox of its own, whose description names the backend and the files.

    Args:
        limits: What a run may use.
        isolation: See `run_python`.
        scratch: Where a folder is made for the time of a run; None: among the system's temporary files.
        folder: The folder of `make_file_tools`. The code gets a copy of its regular files, but of those whose names
            begin with a dot; what it changes is written back when it ends without an error. Behind "landlock" it
            reads the folder and writes nothing. None: it has an empty folder.

    Raises:
        IsolationError: There is no such backend here; the message says what to install.
        ValueError: There is no such folder, or it has too many files for a copy.
    """
    base = None if folder is None else Path(folder)
    if base is not None and not base.is_dir():
        raise ValueError(f"there is no folder {base.name}")
    return _tool(limits, choose(isolation), scratch, base)


def _tool(
    limits: PythonLimits | None, isolation: Isolation, scratch: Path | None = None, folder: Path | None = None
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
    description = (
        "Run Python code (standard library alone, no numpy or pandas, no network) and return what it prints. "
        f"Use print(). {sees} {kept}"
    )

    @make_tool(description=description, rest="print less", read_only=False)
    def python(code: str) -> str:
        return run_isolated(code, limits, isolation, scratch, folder) or "(nothing was printed: use print())"

    return python


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
