"""A program in a process of its own, which ends in time, with what it has written."""

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

    output: bytes  # or results, cut where it was too much
    status: int  # negative: a signal
    stopped: str | None = None  # why it was: "time", "output" or "files"; None if it ended alone
    changes: bytes = b""  # what it wrote to its second descriptor, empty where it was stopped

    def json_lines(self) -> Iterator[Any]:
        """The results of a program of ours: a JSON value on each line. A line that the program did not end is none."""
        for line in self.output.split(b"\n")[:-1]:
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                return


@cache
def program_text(name: str) -> str:
    """The text of a file here, named without `.py`, that is handed to another interpreter (`python -c`)."""
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
    """Run a program with a standard input, and end it and its process group when its time is over.

    Args:
        output: Bytes that it may print, or of its results.
        results: Whether its last argument is a descriptor for results; its output goes nowhere then.
        environment: All of its environment; None: nothing but an empty PATH.
        changes: Bytes that it may write to a second descriptor, whose number is its last argument; None: it has none.
        descriptors: Descriptors that it inherits.

    Raises:
        OSError: The program is not there.
    """
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        source, sink = _pipe(stack)
        limits, told = {source: (output, "output")}, [sink] if results else []
        if changes is not None:
            second, writer = _pipe(stack)
            limits[second] = (changes, "files")
            told.append(writer)
        process = subprocess.Popen(
            [*command, *(str(writer.fileno()) for writer in told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if results else sink,
            stderr=subprocess.DEVNULL if results else subprocess.STDOUT,
            bufsize=0,
            cwd=folder,
            env={"PATH": ""} if environment is None else environment,
            start_new_session=True,
            pass_fds=[*descriptors, *(writer.fileno() for writer in told)],
        )
        for writer in [sink, *told]:
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
    """Write to the program and read from it until it ends or has to be stopped. Returns what it wrote, and why."""
    assert process.stdin is not None
    written = {source: bytearray() for source in limits}

    def ended(stopped: str | None) -> tuple[list[bytes], str | None]:
        return [bytes(text) for text in written.values()], stopped

    left = memoryview(given)
    opened = len(limits)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        for source in limits:
            selector.register(source, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while (wait := end - time.monotonic()) > 0:
            if not opened:  # which is not yet its end
                with suppress(subprocess.TimeoutExpired):
                    process.wait(wait)
                    return ended(None)
            for key, _ in selector.select(wait) if opened else ():
                if isinstance(key.fileobj, FileIO) and key.fileobj in limits:
                    piece = os.read(key.fd, 65536)
                    if not piece:
                        selector.unregister(key.fileobj)
                        opened -= 1
                    written[key.fileobj] += piece
                    most, stopped = limits[key.fileobj]
                    if len(written[key.fileobj]) > most:
                        return ended(stopped)
                    continue
                with suppress(BlockingIOError):
                    try:
                        left = left[os.write(process.stdin.fileno(), left) :]
                    except BrokenPipeError:
                        left = left[:0]
                if not left:
                    selector.unregister(process.stdin)
                    process.stdin.close()
    return ended("time")
