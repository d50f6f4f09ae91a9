"""Runs Python code that a model wrote, in a process of its own.

What it limits: seconds, memory, output, and files (only its own empty folder can be written or read, besides Python's
library); no network, no other programs, no environment. Linux's namespaces cut off the network where they may be
used, and everywhere hooks inside the interpreter refuse sockets, processes and files.

What it does not protect against: code that breaks out of the interpreter itself (the hooks are Python's own audit
hooks, not a sandbox of the operating system). An agent that faces strangers belongs in a container or virtual machine.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass

from langchain_core.tools import BaseTool, ToolException, tool

# Runs in the child, before the code: what it takes away it cannot get back.
_RUNNER = r"""
import ctypes, os, resource, sys
seconds, memory, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
NEWUSER, NEWNET = 0x10000000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(NEWNET) != 0:
    libc.unshare(NEWUSER | NEWNET)  # the hooks below refuse sockets where neither may be done
for limit, value in (
    (resource.RLIMIT_CPU, seconds + 1), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
code = compile(sys.stdin.read(), "code.py", "exec")
import builtins, cmath, collections, datetime, decimal, fractions, itertools, json, math, random, re, statistics, string
import traceback
readable = tuple(os.path.realpath(path) for path in {sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)})
own = os.path.realpath(folder)
FORBIDDEN = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.", "os.kill",
    "ctypes.", "os.chdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.rename", "signal.", "resource.",
    "sys.addaudithook", "webbrowser.", "os.putenv", "os.listxattr", "os.setxattr", "shutil.chown", "_winapi",
    "gc.get_objects", "gc.get_referrers", "sys._getframe", "cpython.run", "fcntl.", "mmap.__new__", "syslog.",
)
def refuse(event, arguments):
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"this code may not do that ({event})")
    if event in ("open", "os.listdir", "os.scandir", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.utime"):
        path = arguments[0]
        if not isinstance(path, (str, bytes, os.PathLike)):
            if event == "open" or path is None:
                return
            raise PermissionError("this code may not do that with a file descriptor")
        real = os.path.realpath(os.fsdecode(path))
        inside = real == own or real.startswith(own + os.sep)
        writes = event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        listing = event in ("os.listdir", "os.scandir")
        library = any(real == path or real.startswith(path + os.sep) for path in readable)
        if not inside and not (library and (listing or not writes)):
            raise PermissionError(f"this code may only use files of its own folder, not {os.fsdecode(path)!r}")
sys.addaudithook(refuse)
try:
    exec(code, {"__name__": "__main__"})
except SystemExit as end:
    if end.code not in (None, 0):
        raise
except BaseException as error:
    kind = type(error).__name__
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "code.py"]
    where = f" in line {lines[-1]}" if lines else ""
    print(f"{kind}{where}: {error}", file=sys.stderr)
    sys.exit(1)
"""


@dataclass(frozen=True)
class PythonLimits:
    """What code may use.

    Attributes:
        seconds: Wall-clock time.
        memory: Address space in bytes.
        output: Characters of what it prints.
    """

    seconds: int = 10
    memory: int = 512 << 20
    output: int = 10_000


def run_python(code: str, limits: PythonLimits | None = None) -> str:
    """Run code and return what it prints.

    Args:
        code: Python.
        limits: What it may use.

    Raises:
        ValueError: It failed, took too long or printed too much; the message says which, and what it printed before.
    """
    limits = limits or PythonLimits()
    with tempfile.TemporaryDirectory(prefix="python-tool-") as folder:
        command = [sys.executable, "-I", "-S", "-c", _RUNNER, str(limits.seconds), str(limits.memory), folder]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": "", "PYTHONIOENCODING": "utf-8", "HOME": folder},
            start_new_session=True,
        )
        try:
            output, problem = _read(process, code, limits)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if problem is None and process.returncode != 0:
        problem = "the code failed" if process.returncode > 0 else "the code used more than it may and was stopped"
    if problem is not None:
        raise ValueError(f"{problem}:\n{output}" if output else problem)
    return output


def _read(process: subprocess.Popen[bytes], code: str, limits: PythonLimits) -> tuple[str, str | None]:
    """What the process prints, and why it had to be stopped if it had."""
    assert process.stdin is not None
    assert process.stdout is not None
    end = time.monotonic() + limits.seconds
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(code.encode())
    printed = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left = end - time.monotonic()
            if left <= 0 or not selector.select(left):
                return printed.decode(errors="replace"), f"the code took more than {limits.seconds} s"
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                return printed.decode(errors="replace"), None
            printed += piece
            if len(printed) > limits.output:
                shown = printed[: limits.output].decode(errors="replace")
                return shown, f"the code printed more than {limits.output} characters"


def make_python_tool(limits: PythonLimits | None = None) -> BaseTool:
    """A tool with limits of its own."""

    @tool
    def python(code: str) -> str:
        """Run Python code (standard library only, no files, no network) and return what it prints. Use print()."""
        try:
            return run_python(code, limits) or "(nothing was printed: use print())"
        except ValueError as error:
            raise ToolException(str(error)) from error

    python.handle_tool_error = True
    return python


python = make_python_tool()
