"""The draft tokens of a *shared draft*, line by line, in memory that the target's process reads.

Neither side waits for the other: a line that is read during a write gives draft tokens that the target rejects.
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

LINES = 128  # concurrent draft requests with a line in a buffer; further ones get none
ROOM = 1024  # capacity of a line in tokens; later tokens are not published
LINES_OF_REPLY = 4  # lines kept per reply: text from before a divergence may recur after it
_TAIL = 8  # tokens of the prefix at the start of a line

_LINE = np.dtype(
    [(name, np.int32) for name in ("length", "prompt_length", "prompt_sum", "origin", "age")]
    + [("token_ids", np.int32, (ROOM,))]
)
"""`length` counts the published tokens. `prompt_length` and `prompt_sum` are length and `checksum` of the prompt.
`origin` is the index of the line's first token in prompt and reply. `age` grows from line to line."""


def checksum(token_ids: Ids) -> int:
    """A checksum of a prompt, by which its lines are found."""
    return zlib.crc32(token_ids.tobytes()) & 0x7FFFFFFF


def open_buffer(path: Path) -> Any:
    """Map the lines of a buffer's file as a record array."""
    return np.memmap(path, dtype=_LINE, mode="r+", shape=(LINES,))


class SharedDraftBuffer:
    """The draft's side of a buffer. Its file is in `folder`, by default shared memory where the system has it.

    Raises EngineStartError if there is no room for it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or (SHARED if os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir()))
        try:
            self._file = tempfile.NamedTemporaryFile(prefix="lookahead-draft-", dir=folder)  # noqa: SIM115
            # Reserves blocks, not only a length: without room for them, a write would kill this process.
            os.posix_fallocate(self._file.fileno(), 0, LINES * _LINE.itemsize)
        except OSError as error:
            raise EngineStartError(f"no file of shared memory can be made in {folder}: {error.strerror}") from error
        self.path = Path(self._file.name)  # the file that the target's process opens
        self.lines = open_buffer(self.path)
        self._free = list(range(LINES))
        self._last_age = 0
        # Lines may be reserved and freed in different threads.
        self._lock = threading.Lock()

    def draft_lines(self, prompt_ids: Sequence[int]) -> "BufferLines":
        """The lines of one reply, given its prompt in the target's token ids, shape (n,)."""
        return BufferLines(self, np.asarray(prompt_ids, dtype=np.int32))

    def forget_file(self) -> None:
        """Remove the file's name; processes that have opened the file keep it. May be called again."""
        self._file.close()

    def reserve(self) -> int | None:
        """Reserve an empty line, give it the newest age, and return its number; None if no line is free."""
        with self._lock:
            if not self._free:
                return None
            self._last_age += 1
            self.lines[self._free[-1]]["age"] = self._last_age & 0x7FFFFFFF
            return self._free.pop()

    def free(self, number: int) -> None:
        """Empty a line and mark it as free."""
        self.lines[number]["length"] = 0
        with self._lock:
            self._free.append(number)


class BufferLines:
    """The newest lines of one reply in a buffer, at most `LINES_OF_REPLY`."""

    def __init__(self, buffer: SharedDraftBuffer, prompt_ids: Ids) -> None:
        self._buffer = buffer
        self._prompt = len(prompt_ids), checksum(prompt_ids)
        self._lines: list[BufferLine] = []

    def begin(self, prefix_ids: Sequence[int]) -> "BufferLine | None":
        """Start a line after prompt and reply so far, shape (m,), m ≥ n; None if the buffer is full."""
        if len(self._lines) == LINES_OF_REPLY:
            self._free_line(self._lines.pop(0))
        if (number := self._buffer.reserve()) is None:
            return None
        line = self._buffer.lines[number]
        tail = prefix_ids[-_TAIL:]
        line["prompt_length"], line["prompt_sum"] = self._prompt
        line["origin"] = len(prefix_ids) - len(tail)
        self._lines.append(BufferLine(line, number))
        self._lines[-1].extend(tail)
        return self._lines[-1]

    def close(self) -> None:
        """Free the reply's lines."""
        while self._lines:
            self._free_line(self._lines.pop())

    def _free_line(self, line: "BufferLine") -> None:
        line.ended = True
        self._buffer.free(line.number)


class BufferLine:
    """The line of a buffer to which one draft request writes."""

    def __init__(self, line: Any, number: int) -> None:
        self.number = number
        self.ended = False  # whether the line was freed, so that another reply may use it
        self._line = line

    def extend(self, token_ids: Sequence[int]) -> None:
        """Publish more tokens; those beyond the line's capacity are dropped."""
        if not self.ended:
            begin = int(self._line["length"])
            published = token_ids[: ROOM - begin]
            self._line["token_ids"][begin : begin + len(published)] = published
            self._line["length"] = begin + len(published)
