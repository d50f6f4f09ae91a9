"""Where the keeper of running engines is found: a Unix socket in a folder that only this user can enter."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.cache import cache_dir, user_folder

FOLDER_VARIABLE = "LOOKAHEAD_AGENT_RUNNING"
_LONGEST = 100
"""Bytes of a socket's path; the system takes 107."""


def running_folder() -> Path:
    """Folder of socket and log: `$LOOKAHEAD_AGENT_RUNNING`, else one of this login's or this user's."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return user_folder(lambda: chosen, f"set {FOLDER_VARIABLE} to a whole path").absolute()
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "lookahead-agent"
    return cache_dir() / "running"


def socket_path() -> Path:
    """The keeper's socket."""
    return running_folder() / "engines.sock"


def log_path() -> Path:
    """What the keeper logs."""
    return running_folder() / "log"


def private_folder() -> Path:
    """The folder, made if it is missing, for this user only.

    Raises:
        ConfigurationError: It cannot be made, is a file, a link or another user's, or is too long a path for a socket.
    """
    folder = running_folder()
    if len(os.fsencode(socket_path())) > _LONGEST:
        raise ConfigurationError(f"{folder} is too long a path for a socket: set {FOLDER_VARIABLE} to a shorter one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # What is looked at and changed is the folder itself, whatever somebody puts in its place meanwhile.
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        kind = "a symbolic link" if os.path.islink(folder) else "a file" if os.path.isfile(folder) else None
        raise _no_place(f"{folder}, which is {kind}" if kind else f"{folder} ({_in_words(error)})") from error
    try:
        if os.fstat(opened).st_uid != os.getuid():
            raise _no_place(f"{folder}, which is another user's")
        os.fchmod(opened, 0o700)
    finally:
        os.close(opened)
    return folder


def _no_place(place: str) -> ConfigurationError:
    return ConfigurationError(f"engines cannot be kept in {place}: set {FOLDER_VARIABLE} to another folder")


def _in_words(error: OSError) -> str:
    return f"{error.strerror or error}: {error.filename}" if error.filename else error.strerror or str(error)


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A socket that listens there while the context lasts, in place of what a keeper that was killed has left.

    Raises:
        ConfigurationError: It cannot be made there.
    """
    path = socket_path()
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            raise _no_place(f"{path} ({_in_words(error)})") from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def is_private(path: Path) -> bool:
    """Whether nobody but this user can have put a socket there."""
    try:
        folder, itself = path.parent.lstat(), path.lstat()
    except OSError:
        return False
    mine = folder.st_uid == itself.st_uid == os.getuid()
    return mine and stat.S_ISDIR(folder.st_mode) and stat.S_ISSOCK(itself.st_mode) and not folder.st_mode & 0o077


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is this user's; yes, where the system cannot tell."""
    peer = _peer(connection)
    return peer is None or peer[1] == os.getuid()  # without a word, the folder's permissions are what there is


def process_at(connection: socket.socket) -> int | None:
    """The number of the process at the other end of a Unix socket; None where the system cannot tell."""
    peer = _peer(connection)
    return peer[0] if peer is not None else None


def _peer(connection: socket.socket) -> tuple[int, int] | None:
    """Process and user at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", told)
    return process, user
