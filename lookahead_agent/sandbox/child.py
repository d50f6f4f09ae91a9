"""A program in a process of its own, which ends in time, with what it has printed."""

from __future__ import annotations

import importlib.resources
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lookahead_agent.sandbox import folders
from lookahead_agent.sandbox.pdf_worker import FRAMES

_OFTEN = 0.05
"""Seconds between two looks at the folder of a program that has no disk of its own."""


@dataclass(frozen=True)
class Finished:
    """How a program ended.

    Attributes:
        output: What it printed on both streams, as bytes; cut where it was too much.
        status: Its exit status; negative: the signal that killed it.
        stopped: Why it was stopped: "time", "output" or "files"; None if it ended by itself.
    """

    output: bytes
    status: int
    stopped: str | None = None


@cache
def program_text(name: str) -> str:
    """The text of a file here that is handed to another interpreter (`python -c`).

    Args:
        name: The file's name without `.py`.
    """
    return importlib.resources.files(__package__).joinpath(f"{name}.py").read_text(encoding="utf-8")


def frames(output: bytes) -> Iterator[Any]:
    """The frames that a program of ours wrote after a mark: each four bytes of length (big-endian) and as many of JSON.

    Text that a library prints goes elsewhere (see `framed_output` in the programs), so it forges no frame.
    Reading ends without an error at what is no whole frame: the program was ended while it wrote.
    """
    start = output.find(FRAMES) + len(FRAMES) if FRAMES in output else len(output)
    while start + 4 <= len(output):
        end = start + 4 + int.from_bytes(output[start : start + 4], "big")
        if end > len(output):
            return
        try:
            yield json.loads(output[start + 4 : end])
        except (ValueError, RecursionError):
            return
        start = end


def run_child(
    command: Sequence[str],
    given: bytes = b"",
    *,
    seconds: float,
    output: int,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    files: int | None = None,
    descriptors: Sequence[int] = (),
) -> Finished:
    """Run a program, and end it and all that it started when its time is over.

    Processes that leave its process group are not ended: a boundary has to refuse that.

    Args:
        command: The program and its arguments.
        given: Its standard input.
        seconds: Wall-clock time for all of it.
        output: Bytes that it may print.
        environment: All of its environment; None: nothing but an empty PATH.
        folder: Where it runs.
        files: Bytes that `folder` may come to; None: that is not looked at. It is looked at twenty times a second, so a
            program can have written some more by then.
        descriptors: Descriptors that it inherits.

    Raises:
        OSError: The program is not there.
    """
    end = time.monotonic() + seconds
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={"PATH": ""} if environment is None else environment,
        start_new_session=True,
        pass_fds=descriptors,
    )
    try:
        printed, stopped = _talk(process, given, end, output, folder if files is not None else None, files or 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
    return Finished(printed[:output], process.returncode, stopped)


def _talk(
    process: subprocess.Popen[bytes], given: bytes, end: float, most: int, folder: Path | None, files: int
) -> tuple[bytes, str | None]:
    """Write to the program and read from it until it closes its output; then wait for it.

    Returns:
        What it printed, and why it has to be stopped.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    printed = bytearray()
    left = memoryview(given)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while True:
            remaining = end - time.monotonic()
            if remaining <= 0:
                return bytes(printed), "time"
            ready = selector.select(remaining if folder is None else min(remaining, _OFTEN))
            if folder is not None and folders.size(folder, files) > files:
                return bytes(printed), "files"
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    left = _written(process, left)
                    if not left:
                        selector.unregister(process.stdin)
                        with suppress(BrokenPipeError):
                            process.stdin.close()
                    continue
                piece = os.read(process.stdout.fileno(), 65536)
                if not piece:
                    return bytes(printed), _ended(process, end, folder, files)
                printed += piece
                if len(printed) > most:
                    return bytes(printed), "output"


def _written(process: subprocess.Popen[bytes], left: memoryview) -> memoryview:
    assert process.stdin is not None
    try:
        return left[os.write(process.stdin.fileno(), left) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return left[:0]


def _ended(process: subprocess.Popen[bytes], end: float, folder: Path | None, files: int) -> str | None:
    """Wait for a program that has closed its output, which is not yet its end."""
    while (remaining := end - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(remaining if folder is None else min(remaining, _OFTEN))
            return None
        if folder is not None and folders.size(folder, files) > files:
            return "files"
    return "time"
