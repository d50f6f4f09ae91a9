"""Which boundaries of the operating system there are here, and which one is taken."""

from __future__ import annotations

import shutil
import sys
from functools import cache
from typing import Literal, get_args

from lookahead_agent.errors import ConfigurationError, IsolationError

Isolation = Literal["auto", "bubblewrap", "namespaces", "landlock", "none"]
"""What stands between a program and the machine.

- "bubblewrap": the program `bwrap`, with namespaces, a root that has Python's library to read and one empty folder in
  memory, and a filter of system calls.
- "namespaces": the same, made by ourselves; Linux lets users do that, or root has to run it.
- "landlock": Linux's Landlock (6.2 or newer) and a stricter filter of system calls: there is no network, no other
  program, and no file but Python's library. The code can write no file, because Landlock counts none. It sees the
  machine's name and process numbers, and can tell by `stat` whether a file exists.
- "none": **no boundary**. The code runs with all rights of the user who runs the agent: it can read and write that
  user's files, use the network and start programs. Only its time, memory, output and size of files are limited. For
  code that you would run yourself, and for machines that are boundaries already (a container or virtual machine with
  nothing in it).
- "auto": the first of the first three that works here.
"""

_BY_STRENGTH: tuple[Isolation, ...] = ("bubblewrap", "namespaces", "landlock")


def available() -> dict[Isolation, str | None]:
    """Why each boundary cannot be used here; None for those that can, the strongest first.

    Each is tried once in a process, by running a program that does nothing (some hundredths of a second).
    """
    return {name: _failure(name) for name in _BY_STRENGTH}


def choose(isolation: Isolation) -> Isolation:
    """The boundary that is meant.

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
        "it with all your rights. "
        f"What was tried: {found}"
    )


def _failure(name: Isolation) -> str | None:
    try:
        return _problem(name)
    except IsolationError as error:
        return str(error)


@cache
def _problem(name: Isolation) -> str | None:
    """As `available`; IsolationError for what may be otherwise next time, which is not kept."""
    from lookahead_agent.sandbox.python import PythonLimits, start

    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    tried = start("print('here')", PythonLimits(seconds=10), name)
    if tried.stopped is None and tried.status == 0 and tried.output == b"here\n":
        return None
    said = " ".join(tried.output.decode(errors="replace").split())
    return said.removeprefix("no boundary: ")[-300:] or f"it ended with {tried.stopped or tried.status}"
