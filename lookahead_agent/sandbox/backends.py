"""The sandbox backends that work here, and Python code run behind one of them."""

from __future__ import annotations

import shutil
import sys
from functools import cache
from pathlib import Path
from typing import get_args

from lookahead_agent.errors import ConfigurationError, IsolationError
from lookahead_agent.sandbox.launch import Isolation, PythonLimits, start
from lookahead_agent.sandbox.worker import NO_SANDBOX

_BY_STRENGTH: tuple[Isolation, ...] = ("bubblewrap", "namespaces", "landlock")


def run_isolated(
    code: str, limits: PythonLimits | None = None, isolation: Isolation = "auto", scratch: Path | None = None
) -> str:
    """Run code, and return what it prints on both streams.

    Args:
        code: Python. It has the standard library, no arguments, and an empty folder to write to; behind "landlock" it
            can write no files.
        limits: What it may use.
        isolation: The backend, see `Isolation`.
        scratch: Where a folder is made for the time of the run; None: among the system's temporary files.

    Raises:
        ValueError: It failed, took too long or used too much; the message says which, and what it printed before.
        IsolationError: There is no such backend here, or no process could be started.
    """
    limits = limits or PythonLimits()
    finished = start(code, limits, choose(isolation), scratch)
    output = finished.output.decode(errors="replace")
    problem = {
        "time": f"the code took more than {limits.seconds:g} s",
        "output": f"the code printed more than {limits.output} bytes",
        "files": f"the code wrote more than {limits.files} bytes",
        None: None,
    }[finished.stopped]
    if problem is None and finished.status != 0:
        failed = 0 < finished.status < 128
        problem = "the code failed" if failed else "the code used more than it may and was stopped"
        if finished.status == NO_SANDBOX:
            problem = "the sandbox could not be made"
    if problem is not None:
        raise ValueError(f"{problem}:\n{output}" if output else problem)
    return output


def available() -> dict[Isolation, str | None]:
    """Why each backend cannot be used here; None for those that can, the strongest first.

    Each is tried once in a process, by running a program that does nothing (some hundredths of a second).
    """
    found: dict[Isolation, str | None] = {}
    for name in _BY_STRENGTH:
        try:
            found[name] = _problem(name)
        except IsolationError as error:
            found[name] = str(error)
    return found


def choose(isolation: Isolation) -> Isolation:
    """The backend that is meant.

    Args:
        isolation: "auto": the strongest that works here.

    Raises:
        ConfigurationError: There is none of that name.
        IsolationError: It does not work here, or none does.
    """
    if isolation not in get_args(Isolation):
        raise ConfigurationError(f"there is no isolation {isolation!r}: {', '.join(get_args(Isolation))}")
    if isolation == "none":
        return isolation
    if isolation != "auto":
        if (problem := _problem(isolation)) is not None:
            raise IsolationError(f"the isolation {isolation!r} does not work here: {problem}")
        return isolation
    for name in _BY_STRENGTH:
        if _problem(name) is None:
            return name
    found = "; ".join(f"{name}: {problem}" for name, problem in available().items())
    raise IsolationError(
        "nothing here can keep a program inside: install bubblewrap (apt-get install bubblewrap, dnf install "
        "bubblewrap), or run on Linux 6.2 or newer with Landlock, where it can write no files; isolation='none' runs "
        f"it with all your rights. What was tried: {found}"
    )


@cache
def _problem(name: Isolation) -> str | None:
    """As `available`; IsolationError for what may be otherwise next time, which is not kept."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    tried = start("print('here')", PythonLimits(seconds=10), name)
    if tried.stopped is None and tried.status == 0 and tried.output == b"here\n":
        return None
    said = " ".join(tried.output.decode(errors="replace").split())
    return said.removeprefix("no sandbox: ")[-300:] or f"it ended with {tried.stopped or tried.status}"
