"""What a draft has written, line by line, in memory that the target's process reads: draft tokens of a *shared draft*.

Nobody waits for anybody: a line that is read while it is written gives draft tokens that the target does not confirm.
"""

import os
import tempfile
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead_agent.engines.processes import SHARED
from lookahead_agent.errors import EngineStartError

Ids = npt.NDArray[np.int32]

LINES = 128  # draft requests that a buffer has room for; more of them at once go without
ROOM = 1024  # tokens of one line: those after them are not shown
LINES_OF_REPLY = 4  # lines that are kept of one reply: what was written before a divergence may be met again after it
_TAIL = 8  # tokens of the prefix with which a line begins

_LINE = np.dtype(
    [(name, np.int32) for name in ("length", "prompt_length", "prompt_sum", "origin", "age")]
    + [("token_ids", np.int32, (ROOM,))]
)
"""Tokens that are shown; length and `checksum` of the reply's prompt; the index in prompt and reply of the line's first
token; a number that grows from line to line; and the tokens."""


def checksum(token_ids: Ids) -> int:
    """A number by which a prompt's lines are found."""
    return zlib.crc32(token_ids.tobytes()) & 0x7FFFFFFF


def open_buffer(path: Path) -> Any:
    """The lines in a buffer's file: a record array."""
    return np.memmap(path, dtype=_LINE, mode="r+", shape=(LINES,))


class SharedDraftBuffer:
    """The draft's side of a buffer, whose file is in a folder, or in memory where the system has one.

    Raises EngineStartError if there is no room for it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or (SHARED if os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir()))
        try:
            self._file = tempfile.NamedTemporaryFile(prefix="lookahead-draft-", dir=folder)  # noqa: SIM115
            # Not by its length alone: where there is no room for it, writing to it would end this process.
            os.posix_fallocate(self._file.fileno(), 0, LINES * _LINE.itemsize)
        except OSError as error:
            raise EngineStartError(f"no file of shared memory can be made in {folder}: {error.strerror}") from error
        self.path = Path(self._file.name)  # the file that the target's process opens
        self.lines = open_buffer(self.path)
        self._free = list(range(LINES))
        self._begun = 0
        # Replies end in the event loop, and buffers in any thread.
        self._lock = threading.Lock()

    def draft_lines(self, prompt_ids: Sequence[int]) -> "BufferLines":
        """The lines of one reply, by its prompt in the target's token ids, shape (n,)."""
        return BufferLines(self, np.asarray(prompt_ids, dtype=np.int32))

    def forget_file(self) -> None:
        """Remove the file's name; whoever has opened it keeps it. May be called again."""
        self._file.close()

    def take(self) -> int | None:
        """The number of an empty line of the newest age; None if there is none."""
        with self._lock:
            if not self._free:
                return None
            self._begun += 1
            self.lines[self._free[-1]]["age"] = self._begun & 0x7FFFFFFF
            return self._free.pop()

    def give_back(self, number: int) -> None:
        """Empty a line and have it free again."""
        self.lines[number]["length"] = 0
        with self._lock:
            self._free.append(number)


class BufferLines:
    """The lines of one reply in a buffer: the newest few."""

    def __init__(self, buffer: SharedDraftBuffer, prompt_ids: Ids) -> None:
        self._buffer = buffer
        self._prompt = len(prompt_ids), checksum(prompt_ids)
        self._begun: list[BufferLine] = []

    def begin(self, prefix_ids: Sequence[int]) -> "BufferLine | None":
        """A new line after prompt and reply so far, shape (m,), m ≥ n; None if the buffer is full."""
        if len(self._begun) == LINES_OF_REPLY:
            self._end(self._begun.pop(0))
        if (number := self._buffer.take()) is None:
            return None
        line = self._buffer.lines[number]
        tail = prefix_ids[-_TAIL:]
        line["prompt_length"], line["prompt_sum"] = self._prompt
        line["origin"] = len(prefix_ids) - len(tail)
        self._begun.append(BufferLine(line, number))
        self._begun[-1].extend(tail)
        return self._begun[-1]

    def close(self) -> None:
        """Clear the reply's lines."""
        while self._begun:
            self._end(self._begun.pop())

    def _end(self, line: "BufferLine") -> None:
        line.ended = True
        self._buffer.give_back(line.number)


class BufferLine:
    """What one draft request writes, in a line of a buffer."""

    def __init__(self, line: Any, number: int) -> None:
        self.number = number
        self.ended = False  # whether another line may have taken this one's place
        self._line = line

    def extend(self, token_ids: Sequence[int]) -> None:
        """Show more tokens; those beyond the line's room are not shown."""
        if not self.ended:
            begin = int(self._line["length"])
            shown = token_ids[: ROOM - begin]
            self._line["token_ids"][begin : begin + len(shown)] = shown
            self._line["length"] = begin + len(shown)
