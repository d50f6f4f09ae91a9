"""Runs Python code that a model wrote, in a sandbox of the operating system.

The code has Python's standard library and an empty folder. It cannot reach the network, start programs, or see the
files and the environment of the agent; its time, memory, output and files are limited. What stands between it and the
machine is `lookahead_agent.sandbox`: bubblewrap or Landlock, whichever is there.
Behind Landlock the code can write no files. docs/reference/tools.md says what each keeps out.
"""

from __future__ import annotations

from pathlib import Path

from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import make_tool
from lookahead_agent.sandbox import Isolation, IsolationError, PythonLimits, choose, run_isolated

__all__ = ["Isolation", "IsolationError", "PythonLimits", "make_python_tool", "python", "run_python"]


def run_python(code: str, limits: PythonLimits | None = None, isolation: Isolation = "auto") -> str:
    """Run code and return what it prints.

    Args:
        code: Python.
        limits: What it may use.
        isolation: What stands between it and this machine; "none" is no sandbox at all, see `Isolation`.

    Raises:
        ValueError: It failed, took too long or used too much; the message says which, and what it printed before.
        IsolationError: There is no such backend here, and the message says what to install; or no process could be
            started.
    """
    return run_isolated(code, limits, isolation)


def make_python_tool(
    limits: PythonLimits | None = None, isolation: Isolation = "auto", scratch: Path | None = None
) -> BaseTool:
    """A tool with limits and a sandbox of its own, whose description names the backend.

    Args:
        limits: What a run may use.
        isolation: See `run_python`.
        scratch: Where a folder is made for the time of a run; None: among the system's temporary files.

    Raises:
        IsolationError: There is no such backend here; the message says what to install.
    """
    return _tool(limits, choose(isolation), scratch)


def _tool(limits: PythonLimits | None, isolation: Isolation, scratch: Path | None = None) -> BaseTool:
    unusual = {
        "auto": "There is nothing here to isolate it with.",
        "none": "It is not isolated.",
        "landlock": "It is isolated by landlock, and can write no files.",
    }
    kept = unusual.get(isolation, f"It is isolated by {isolation}.")

    description = f"Run Python code (standard library, no network) and return what it prints. Use print(). {kept}"

    @make_tool(description=description, rest="print less")
    def python(code: str) -> str:
        return run_isolated(code, limits, isolation, scratch) or "(nothing was printed: use print())"

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
