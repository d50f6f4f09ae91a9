"""The text of a PDF's pages, in a process of its own.

The text of this file is handed to another interpreter (`python -I -c`). It reads the PDF from its standard input, and
writes a frame for each page, `{"page": its number from 1, "text": ...}`, and a last one, `{"problem": ...}`: why it has
to stop, or None.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from typing import BinaryIO

FRAMES = b"\0frames\0"
"""Comes before the frames, and after what Python's start may have printed."""


def framed_output() -> BinaryIO:
    """Takes standard output for frames alone: what libraries print goes nowhere from here on."""
    frames = os.fdopen(os.dup(1), "wb")
    frames.write(FRAMES)
    frames.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return frames


def send(frames: BinaryIO, value: object) -> None:
    """Write a frame: four bytes of length (big-endian), and as many of JSON."""
    data = json.dumps(value).encode()
    frames.write(len(data).to_bytes(4, "big") + data)
    frames.flush()


def main(memory: int, seconds: int) -> None:
    """Everything.

    Args:
        memory: Bytes of data that the process may have.
        seconds: Time of a processor that it may take, also if the agent was killed.
    """
    frames = framed_output()
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        from pypdf import PdfReader

        for number, page in enumerate(PdfReader(io.BytesIO(sys.stdin.buffer.read())).pages, 1):
            if text := page.extract_text().strip():
                send(frames, {"page": number, "text": text})
        send(frames, {"problem": None})
    except Exception as error:  # broken files make a parser fail in every way
        send(frames, {"problem": f"{type(error).__name__}: {error}"[:300]})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
