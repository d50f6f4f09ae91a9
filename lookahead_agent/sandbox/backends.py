"""Runs a stranger's Python code behind one of the sandbox backends that work here."""

import base64
import importlib.metadata
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from lookahead_agent.errors import ConfigurationError, IsolationError
from lookahead_agent.sandbox.cgroup import memory_cgroup
from lookahead_agent.sandbox.child import ChildResult, program_text, run_child
from lookahead_agent.sandbox.seccomp import system_call_filter
from lookahead_agent.sandbox.worker import BEGUN, HOST, NO_SANDBOX, may_change_user
from lookahead_agent.sandbox.working_folder import copies, packed, save_changes, space

_INSIDE = "/own"
_LARGEST_FILE = 16 << 20
_THREADS = 64
_INODES = 4096
_REPORT = 1 << 20
_KERNEL_MEMORY = 64 << 20  # Bytes that the kernel may need for a run, where a cgroup counts them
# Beside Python's own: what its extension modules are linked with, and the time zones.
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")

Isolation = Literal["auto", "bubblewrap", "landlock", "none"]
"""The backend that keeps a program from the machine.

- "bubblewrap": the program `bwrap`, with namespaces, a root that has Python's library to read and one empty folder in
  memory, and a filter of system calls.
- "landlock": Linux's Landlock (6.2 or newer) and a stricter filter of system calls: there is no network, no other
  program, and no file but Python's library. The code can write no file, because Landlock counts none. It sees the
  machine's name and process numbers, and can tell by `stat` whether a file exists.
- "none": **no sandbox**. The code runs with all rights of the user who runs the agent: it can read and write that
  user's files, use the network and start programs. Only its time, memory, output and size of a file are limited. For
  code that you would run yourself, and for machines that are sandboxes already (a container or virtual machine with
  nothing in it).
- "auto": the first of the first two that works here.
"""

_BY_STRENGTH: tuple[Isolation, ...] = ("bubblewrap", "landlock")


@dataclass(frozen=True)
class PythonLimits:
    """What code may use.

    Raises:
        ConfigurationError: A number is negative, or seconds or memory are 0: the kernel would read that as no limit.
    """

    seconds: float = 20  # wall-clock time, Python's start included
    memory: int = 512 << 20  # address space in bytes
    output: int = 10_000  # bytes of what it prints
    files: int = 64 << 20  # bytes of all its files, which are in memory, too; with "none" of one file

    def __post_init__(self) -> None:
        if not (0 < self.seconds < math.inf and self.memory > 0 and self.output >= 0 and self.files >= 0):
            raise ConfigurationError(f"seconds and memory have to be above 0, and output and files not below: {self}")


def run_isolated(
    code: str,
    limits: PythonLimits | None = None,
    isolation: Isolation = "auto",
    folder: Path | None = None,
    packages: Sequence[str] = (),
) -> str:
    """Run code, and return what it prints on both streams and the value of a last expression, as in a notebook.

    Args:
        code: Python. It has the standard library, no arguments, and an empty folder to write to; behind "landlock" it
            can write no files.
        limits: What it may use.
        isolation: The backend, see `Isolation`.
        folder: The user's folder; None: the code has an empty one.
        packages: Names of installed packages that the code may import, beside the standard library.

    Raises:
        ValueError: It failed, took too long or used too much; the message says which, and what it printed before.
        IsolationError: There is no such backend here, or no process could be started.
    """
    limits = limits or PythonLimits()
    isolation = choose(isolation)
    copied = None if folder is None or isolation == "landlock" else copies(folder, limits.files)
    finished = start(code, limits, isolation, folder, copied, packages)
    output = finished.output.decode(errors="replace")
    problem = {
        "time": f"the code took more than {limits.seconds:g} s",
        "output": f"the code printed more than {limits.output} bytes",
        "files": f"the code wrote more than {limits.files} bytes",
        None: _problem_of_status(finished.status),
    }[finished.stopped]
    if problem is not None:
        problem += "" if copied is None else ", and changed no file"
        raise ValueError(f"{problem}:\n{output}" if output else problem)
    if folder is None or copied is None:
        return output
    try:
        said = save_changes(folder, copied, finished.changes)
    except ValueError as error:
        raise ValueError(f"a file cannot be saved: {error}:\n{output}" if output else str(error)) from None
    return f"{output.rstrip()}\n{said}".lstrip() if said else output


def _problem_of_status(status: int) -> str | None:
    if status in (0, NO_SANDBOX):
        return "the sandbox could not be made" if status else None
    return "the code failed" if 0 < status < 128 else "the code used more than it may and was stopped"


def available() -> dict[Isolation, str | None]:
    """Why each backend cannot be used here; None for those that can, the strongest first. Each is tried once."""
    found: dict[Isolation, str | None] = {}
    for name in _BY_STRENGTH:
        try:
            found[name] = _problem(name)
        except IsolationError as error:
            found[name] = str(error)
    return found


def choose(isolation: Isolation) -> Isolation:
    """The backend that is meant, of "auto" the strongest that works here.

    Raises:
        ConfigurationError: There is none of that name.
        IsolationError: It does not work here, or none does.
    """
    if isolation not in get_args(Isolation):
        raise ConfigurationError(f"there is no isolation {isolation!r}: {', '.join(get_args(Isolation))}")
    if isolation == "auto":
        for name in _BY_STRENGTH:
            if _problem(name) is None:
                return name
    elif isolation == "none" or (problem := _problem(isolation)) is None:
        return isolation
    else:
        raise IsolationError(f"the isolation {isolation!r} does not work here: {problem}")
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


def start(
    code: str,
    limits: PythonLimits,
    isolation: Isolation,
    folder: Path | None = None,
    copied: Mapping[str, bytes] | None = None,
    packages: Sequence[str] = (),
) -> ChildResult:
    """As `run_isolated`, behind a backend that is known to work; with copies of the folder's files, or None."""
    program = b"" if isolation == "none" else system_call_filter(landlock=isolation == "landlock")
    if program is None:
        raise IsolationError(
            "system calls are known here for x86_64 and aarch64 only: isolation='none' is what is left"
        )
    of_packages = package_files(*packages) if packages else ()
    readable = (*_readable(), *of_packages)
    home, room = {"landlock": "/"}.get(isolation, _INSIDE), limits.files + space(copied or {})
    cgroup = None
    try:
        with ExitStack() as stack:
            if isolation == "none":
                home = os.path.realpath(tempfile.mkdtemp(prefix="isolated-"))
                stack.callback(_remove, home)
            else:
                cgroup = stack.enter_context(memory_cgroup(limits.memory + room + _KERNEL_MEMORY))
            around = _bubblewrap(readable) if isolation == "bubblewrap" else []
            largest = max(map(len, (copied or {}).values()), default=0)
            shown = str(folder.resolve()) if folder is not None and isolation == "landlock" else None
            plan = {
                "isolation": isolation,
                "agent": os.getpid(),
                "cgroup": cgroup,
                "readable": readable,
                "packages": sorted({os.path.dirname(path) for path in of_packages}),
                "inside": home,
                "seconds": limits.seconds,
                "memory": limits.memory,
                "file": max(largest, min(_LARGEST_FILE, limits.files)),
                "files": room,
                "inodes": _INODES + 2 * len(copied or {}),
                "folder": shown,
                "importable": shown if copied is None else home,
                "threads": _threads(isolation),
                "filter": base64.b64encode(program).decode(),
            }
            finished = run_child(
                [*around, _interpreter(), "-I", "-S", "-u", "-c", program_text("worker"), json.dumps(plan)],
                packed(code.encode(errors="replace"), copied or {}),
                seconds=limits.seconds,
                output=len(BEGUN) + limits.output,
                environment={
                    "PATH": "",
                    "PYTHONIOENCODING": "utf-8",
                    "HOME": home,
                    "TMPDIR": home,
                    "LANG": "C.UTF-8",
                    "OPENBLAS_NUM_THREADS": "1",  # numpy's; each further thread takes of the address space
                },
                folder=Path(home if isolation == "none" else "/"),
                # With the line of each file.
                changes=None if copied is None else 2 * room + _REPORT,
                descriptors=() if cgroup is None else (cgroup,),
            )
    except OSError as error:
        raise IsolationError(f"the code could not be run: {error}") from error
    if not finished.output.startswith(BEGUN):
        return finished
    # An exit status is the code's own choice: only the worker says that there is no sandbox.
    status = 1 if finished.status == NO_SANDBOX else finished.status
    return replace(finished, output=finished.output.removeprefix(BEGUN), status=status)


def _remove(folder: str) -> None:
    """Remove the folder of code without a sandbox, which may have removed it, closed it or nested it deeply."""
    with suppress(OSError):
        os.rmdir(folder)  # which needs no process, where there can be none
        return
    for command in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
        subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def _bubblewrap(readable: Sequence[str]) -> list[str]:
    """The beginning of the command, for that backend."""
    program = shutil.which("bwrap")
    if program is None:
        raise IsolationError("bwrap is not installed any more")
    kept = ["CAP_SYS_ADMIN"]
    who = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if may_change_user():
        # It becomes a user of its own: the kernel counts no threads of root, whatever root is called inside.
        kept += ["CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"]
    else:
        who += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    who += ["--hostname", HOST.decode(), "--die-with-parent"]
    bound = [("--ro-bind", path) for path in readable]
    bound += [("--dev-bind", path) for path in ("/dev/null", "/dev/urandom")]
    # By itself, bwrap makes folders above them that are closed to others.
    there = [word for kind, path in bound for word in ("--dir", os.path.dirname(path), kind, path, path)]
    # It mounts the folder itself, for bwrap sets no limit to the number of files, and then gives that up.
    own = ["--dir", _INSIDE, "--cap-drop", "ALL", *(word for name in kept for word in ("--cap-add", name))]
    return [program, *who, *there, *own, "--remount-ro", "/", "--"]


def _threads(isolation: Isolation) -> int:
    """How many threads the user who runs the code may have, for the kernel counts by user."""
    if isolation == "none":
        return resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if isolation != "landlock" or os.geteuid() == 0:
        return _THREADS  # a user of its own
    user = os.geteuid()
    others = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended meanwhile
            fields = dict(line.split(":", 1) for line in status.read_text(errors="replace").split("\n") if ":" in line)
            others += int(fields["Threads"]) if int(fields["Uid"].split()[0]) == user else 0
    return _THREADS + others


@cache
def _interpreter() -> str:
    """The interpreter that virtual environments stand on, without their packages."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _readable() -> tuple[str, ...]:
    """What a Python program needs to read: existing paths, none inside of another."""
    base = os.path.realpath(sys.base_prefix)
    candidates = [_interpreter(), os.path.realpath(sysconfig.get_path("stdlib")), *_SYSTEM]
    candidates += [os.path.join(base, "lib")] if base != "/usr" else []
    found: list[str] = []
    for path in sorted(dict.fromkeys(candidates), key=len):
        if os.path.exists(path) and not any(path == kept or path.startswith(kept + os.sep) for kept in found):
            found.append(path)
    return tuple(found)


@cache
def package_files(*names: str) -> tuple[str, ...]:
    """Folders and modules of installed packages, and of what they need; ConfigurationError if one is not installed."""
    # Without packages, the sandbox itself needs none.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    paths: dict[str, None] = {}
    left, seen = list(names), set[str]()
    while left:
        if (name := canonicalize_name(left.pop())) in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationError(f"no package {name!r} is installed for the code: pip install {name}") from None
        parts = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        paths |= dict.fromkeys(os.path.realpath(str(found.locate_file(part))) for part in sorted(parts))
        needed = map(Requirement, found.requires or ())
        left += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return tuple(filter(os.path.exists, paths))
