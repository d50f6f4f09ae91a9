"""Runs a program in a child process with a timeout, and collects its output."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ChildResult:
    """How a program ended."""

    output: bytes  # or results, truncated at the limit
    status: int  # negative: killed by that signal
    stopped: str | None = None  # why it was killed: "time", "output" or "files"; None: it ended alone
    changes: bytes = b""  # what it wrote to its second descriptor; empty if it was killed

    def json_lines(self) -> Iterator[Any]:
        """Yield the JSON value of each line, up to an invalid line. A last line without a line break is ignored."""
        for line in self.output.split(b"\n")[:-1]:
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                return


@cache
def program_text(name: str) -> str:
    """Return the text of a module here, named without `.py`, for another interpreter (`python -c`)."""
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")


def run_child(
    command: Sequence[str],
    given: bytes = b"",
    *,
    seconds: float,
    output: int,
    results: bool = False,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    changes: int | None = None,
    descriptors: Sequence[int] = (),
) -> ChildResult:
    """Run a program with a standard input, and kill its process group at the timeout or when it ends.

    Args:
        output: Maximum bytes of its output, or of its results.
        results: Whether its last argument is a descriptor for results; its output is then discarded.
        environment: The whole environment; None: an empty PATH only.
        changes: Maximum bytes on a second descriptor, whose number is the last argument; None: there is none.
        descriptors: Descriptors that the program inherits.

    Raises:
        OSError: The program cannot be started.
    """
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        source, sink = _pipe(stack)
        limits, passed = {source: (output, "output")}, [sink] if results else []
        if changes is not None:
            reader, writer = _pipe(stack)
            limits[reader] = (changes, "files")
            passed.append(writer)
        process = subprocess.Popen(
            [*command, *(str(writer.fileno()) for writer in passed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if results else sink,
            stderr=subprocess.DEVNULL if results else subprocess.STDOUT,
            bufsize=0,
            cwd=folder,
            env={"PATH": ""} if environment is None else environment,
            start_new_session=True,
            pass_fds=[*descriptors, *(writer.fileno() for writer in passed)],
        )
        for writer in [sink, *passed]:
            writer.close()
        try:
            written, stopped = _read(process, limits, given, end)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
    returned = b"" if stopped or changes is None else written[1]
    return ChildResult(written[0][:output], process.returncode, stopped, returned)


def _pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    reader, writer = os.pipe()
    return stack.enter_context(open(reader, "rb", 0)), stack.enter_context(open(writer, "wb", 0))


def _read(
    process: subprocess.Popen[bytes], limits: Mapping[FileIO, tuple[int, str]], given: bytes, end: float
) -> tuple[list[bytes], str | None]:
    """Feed and read the program until it ends or a limit is reached. Returns its output and the reason to kill it."""
    assert process.stdin is not None
    written = {source: bytearray() for source in limits}

    def result(stopped: str | None) -> tuple[list[bytes], str | None]:
        return [bytes(text) for text in written.values()], stopped

    pending = memoryview(given)
    open_pipes = len(limits)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        for source in limits:
            selector.register(source, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while (wait := end - time.monotonic()) > 0:
            if not open_pipes:  # the program may still run
                with suppress(subprocess.TimeoutExpired):
                    process.wait(wait)
                    return result(None)
            for key, _ in selector.select(wait) if open_pipes else ():
                if isinstance(key.fileobj, FileIO) and key.fileobj in limits:
                    piece = os.read(key.fd, 65536)
                    if not piece:
                        selector.unregister(key.fileobj)
                        open_pipes -= 1
                    written[key.fileobj] += piece
                    limit, stopped = limits[key.fileobj]
                    if len(written[key.fileobj]) > limit:
                        return result(stopped)
                    continue
                with suppress(BlockingIOError):
                    try:
                        pending = pending[os.write(process.stdin.fileno(), pending) :]
                    except BrokenPipeError:
                        pending = pending[:0]
                if not pending:
                    selector.unregister(process.stdin)
                    process.stdin.close()
    return result("time")
