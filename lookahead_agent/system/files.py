"""The user's folders, and files that are written whole."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lookahead_agent.errors import ConfigurationError

CACHE_VARIABLE = "LOOKAHEAD_AGENT_CACHE"
# Windows opens no file relative to a folder.
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC if hasattr(os, "O_DIRECTORY") else 0


def cache_dir() -> Path:
    """The folder of fetched models: `$LOOKAHEAD_AGENT_CACHE`, else `lookahead-agent` in the user's cache folder."""
    import platformdirs  # here, because the sandbox opens folders without packages

    chosen = os.environ.get(CACHE_VARIABLE)
    return user_folder(
        lambda: chosen or platformdirs.user_cache_dir("lookahead-agent"),
        f"set {CACHE_VARIABLE} to a folder that may be written",
    )


def user_folder(find: Callable[[], str], advice: str) -> Path:
    """The folder that `find` returns; raises ConfigurationError with `advice` if there is no home folder for it."""
    try:
        return Path(find()).expanduser()
    except RuntimeError:
        raise ConfigurationError(f"there is no home folder: {advice}") from None


@contextmanager
def open_folder(name: str | Path, base: int | None = None) -> Iterator[int]:
    """Open a folder that is not a link, relative to `base` if given, and yield its descriptor. Raises OSError."""
    descriptor = os.open(name, FOLDER_FLAGS, dir_fd=base)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def writable(file: Path) -> Iterator[None]:
    """Create the folder of a file that the user named, and turn the block's OS errors into ConfigurationError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error.strerror or error}") from error


def write_atomically(file: Path, text: str | bytes) -> None:
    """Write a text or bytes to a file completely or not at all; a device or a pipe is written to directly."""
    file = Path(os.path.realpath(file))  # a link stays a link
    content = text if isinstance(text, bytes) else text.encode(errors="backslashreplace")
    if file.exists() and not file.is_file():
        file.write_bytes(content)
        return
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(8)}.unfinished")
    try:
        with unfinished.open("xb") as out:
            out.write(content)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
