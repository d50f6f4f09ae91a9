"""The daemon that `lookahead-agent up` starts, on a Unix socket in a folder that only this user can enter."""

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import psutil

from lookahead_agent.engines.processes import mark_detached
from lookahead_agent.errors import ConfigurationError, EngineStartError
from lookahead_agent.generation.server_backend import (
    RUNTIME_DIR_VARIABLE,
    is_private,
    runtime_dir,
    server_status,
    socket_path,
)
from lookahead_agent.server import ServerSettings
from lookahead_agent.system import background
from lookahead_agent.system.files import open_folder

_MAX_DIGITS = 20  # Digits of a process id that are read
_MAX_PATH = 100  # Bytes of a socket's path; Linux allows 107
_COMMAND = "from lookahead_agent.cli.app import main; main()"


def daemon_settings(engines_digest: str, *, start_models: bool = False) -> ServerSettings:
    """The daemon's settings, with limits that this user's programs cannot reach in practice."""
    limits: dict[str, Any] = {
        "max_body_bytes": 64 << 20,
        "max_tokens": 2**31 - 1,
        "concurrent": 1 << 16,
        "connections": 1 << 16,
    }
    return ServerSettings.model_validate({"engines_digest": engines_digest, "start_models": start_models, **limits})


def log_path() -> Path:
    """The path of the daemon's log."""
    return runtime_dir() / "log"


def private_dir() -> Path:
    """Create the runtime directory if it is missing, accessible to this user only, and return it."""
    folder = runtime_dir()
    if len(os.fsencode(socket_path())) > _MAX_PATH:
        raise ConfigurationError(
            f"{folder} is too long a path for a socket: set {RUNTIME_DIR_VARIABLE} to a shorter one"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # A file descriptor cannot be redirected by replacing the folder in a race.
        with open_folder(folder) as descriptor:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise _unusable(f"{folder}, which is another user's")
            os.fchmod(descriptor, 0o700)
    except OSError as error:
        # `Path.is_symlink` raises within a folder that this user cannot enter.
        kind = "a symbolic link" if os.path.islink(folder) else "a file" if os.path.isfile(folder) else None
        raise _unusable(f"{folder}, which is {kind}" if kind else f"{folder} ({_reason(error)})") from error
    return folder


def _unusable(place: str) -> ConfigurationError:
    return ConfigurationError(f"no server can listen in {place}: set {RUNTIME_DIR_VARIABLE} to another folder")


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}: {error.filename}" if error.filename else error.strerror or str(error)


def _open_private(name: str, flags: int) -> TextIO:
    """Open a regular file of the runtime directory for this user only; raises ConfigurationError for another file."""
    path = runtime_dir() / name
    try:
        # O_NONBLOCK: a pipe's other end is not waited for.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "no regular file", str(path))
        if flags & os.O_CREAT:
            os.fchmod(descriptor, 0o600)
    except OSError as error:
        raise _unusable(f"{runtime_dir()} ({_reason(error)})") from error
    return open(descriptor, "r+" if flags & os.O_RDWR else "r", encoding="utf-8", errors="replace")


@contextmanager
def start_lock() -> Iterator[TextIO]:
    """Hold the file lock of this user's daemon while the context lasts; raises ConfigurationError if it is taken.

    The file holds this process's id. A daemon truncates it when it listens: from then on, its socket has its status.
    """
    with _open_private("lock", os.O_RDWR | os.O_CREAT) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "another `up` or `down` is in progress: see `lookahead-agent status`"
            raise ConfigurationError(message) from None
        lock.truncate(0)
        print(os.getpid(), file=lock, flush=True)
        yield lock


def find_starting_pid() -> int | None:
    """Return the id of the daemon that is loading its engines, or None if none is."""
    if not is_private(socket_path()):  # a daemon binds its socket before it loads
        return None
    with suppress(OSError, ValueError, OverflowError, psutil.Error, ConfigurationError):
        return _read_starting_pid()
    return None


def _read_starting_pid() -> int | None:
    with _open_private("lock", os.O_RDONLY) as lock:
        process = psutil.Process(int(lock.read(_MAX_DIGITS)))
        # A container that shares the folder may have another process of this id.
        if "--foreground" in process.cmdline():
            try:  # last, so that a lock held for a moment cannot refuse a start
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return process.pid
    return None


@contextmanager
def bind_socket() -> Iterator[socket.socket]:
    """Bind the daemon's socket while the context lasts, replacing one that a killed daemon left behind."""
    path = socket_path()
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            raise _unusable(f"{path} ({_reason(error)})") from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def start_daemon(arguments: Sequence[str], on_line: Callable[[str], None], command: str = _COMMAND) -> int:
    """Start the command line as a process in a new session; return its process id once the server responds.

    `on_line` receives the log's lines until then. Raises EngineStartError with the last line if the process ends.
    """
    with start_lock():
        pass
    with (
        _open_private("log", os.O_RDWR | os.O_CREAT) as log,
        log_path().open(encoding="utf-8", errors="replace") as log_lines,
    ):
        log.truncate(0)
        process = subprocess.Popen(
            # -P: modules in the current folder are not imported.
            [sys.executable, "-P", "-c", command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        line = last_line = ""
        try:
            while process.poll() is None:
                status = background.run(server_status())
                while (text := log_lines.readline()).endswith("\n"):
                    last_line = (line + text).rstrip()
                    on_line(last_line)
                    line = ""
                line += text
                if status is not None and status.pid == process.pid:
                    mark_detached(process.pid)
                    return process.pid
                time.sleep(0.1)
        except BaseException:  # Ctrl-C while the models load
            process.terminate()
            process.wait()
            raise
        last_line = (line + log_lines.read()).strip().rpartition("\n")[2] or last_line
    reason = last_line.removeprefix("Error: ") or f"exit status {process.returncode}"
    raise EngineStartError(f"the engines did not start: {reason} (the whole log: {log_path()})")
