"""What a draft has written, in memory that the target's process reads: the draft tokens of a *shared draft*.

A buffer has lines. A line is what one draft request writes: the last tokens of the prefix that it writes after, and its
own tokens. The draft's side (this process) writes lines; the target's side (`SharedDraftProposer`, in
vLLM's process) reads them at every pass. Nobody waits for anybody: a line that is read while it is written gives
draft tokens that the target does not confirm, and nothing worse.
"""

from __future__ import annotations

import os
import tempfile
import threading
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead_agent.engines.crash_report import SHARED
from lookahead_agent.engines.processes import create_locked, remove_stale
from lookahead_agent.errors import EngineStartError

Ids = npt.NDArray[np.int32]

_PREFIX = "lookahead-shared-draft-"
LINES = 128
"""Draft requests that a buffer has room for; more of them at once go without."""
ROOM = 1024
"""Tokens of one line: those after them are not shown."""
LINES_OF_REPLY = 4
"""Lines that are kept of one reply: what was written before a divergence may be met again after it."""
TAIL = 8
"""Tokens of the prefix with which a line begins."""

# Columns of a line before its tokens.
_LENGTH, _PROMPT_LENGTH, _PROMPT_SUM, _ORIGIN, _NUMBER = range(5)
_TOKENS = 5


def checksum(token_ids: Ids) -> int:
    """A number by which a prompt's lines are found."""
    return zlib.crc32(token_ids.tobytes()) & 0x7FFFFFFF


class SharedDraftBuffer:
    """The draft's side of a buffer.

    Args:
        folder: Where its file is; None: memory, where the system has such a folder. `forget_file` removes it as soon
            as the target's process has opened it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._lock_of_file: int | None
        self.path, self._lock_of_file = _made([folder] if folder is not None else [SHARED, Path(tempfile.gettempdir())])
        """The file that the target's process opens."""
        self._cells = _opened(self.path)
        self._free = list(range(LINES))
        self._begun = 0
        # Replies end in the event loop, and buffers in any thread.
        self._lock = threading.Lock()

    def draft_lines(self, prompt_ids: Sequence[int]) -> BufferLines:
        """The lines of one reply.

        Args:
            prompt_ids: The prompt in the target's token ids, shape (n,).
        """
        return BufferLines(self, np.asarray(prompt_ids, dtype=np.int32))

    def forget_file(self) -> None:
        """Remove the file's name; whoever has opened it keeps it. May be called again."""
        self.path.unlink(missing_ok=True)
        if self._lock_of_file is not None:
            os.close(self._lock_of_file)
            self._lock_of_file = None

    def take(self) -> int | None:
        """The number of a free line; None if there is none."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, number: int) -> None:
        """Clear a line and have it free again."""
        self._cells[number, _LENGTH] = 0
        with self._lock:
            self._free.append(number)

    def cleared(self, number: int) -> Ids:
        """A line's cells, of which only the line's age is filled in."""
        self._begun += 1
        cells: Ids = self._cells[number]
        cells[_LENGTH] = 0
        cells[_NUMBER] = self._begun & 0x7FFFFFFF
        return cells


class BufferLines:
    """The lines of one reply: the newest few.

    Args:
        buffer: Where they stand.
        prompt_ids: The reply's prompt, shape (n,).
    """

    def __init__(self, buffer: SharedDraftBuffer, prompt_ids: Ids) -> None:
        self._buffer = buffer
        self._prompt_length = len(prompt_ids)
        self._prompt_sum = checksum(prompt_ids)
        self._lines: list[BufferLine] = []

    def begin(self, prefix_ids: Sequence[int]) -> BufferLine | None:
        """A new line; None if the buffer is full.

        Args:
            prefix_ids: Prompt and reply up to where the draft begins to write, shape (m,), m ≥ n.
        """
        number = self._buffer.take() if len(self._lines) < LINES_OF_REPLY else self._lines.pop(0).give_up()
        if number is None:
            return None
        cells = self._buffer.cleared(number)
        tail = prefix_ids[-TAIL:]
        cells[_PROMPT_LENGTH : _ORIGIN + 1] = self._prompt_length, self._prompt_sum, len(prefix_ids) - len(tail)
        cells[_TOKENS : _TOKENS + len(tail)] = tail
        cells[_LENGTH] = len(tail)
        self._lines.append(BufferLine(cells, number))
        return self._lines[-1]

    def close(self) -> None:
        """Clear the reply's lines."""
        while self._lines:
            self._buffer.give_back(self._lines.pop().give_up())


class BufferLine:
    """What one draft request writes.

    Args:
        cells: The line's.
        number: Which line of the buffer it is.
    """

    def __init__(self, cells: Ids, number: int) -> None:
        self._cells: Ids | None = cells
        self._number = number
        self._length = int(cells[_LENGTH])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Show more tokens; those beyond the line's room are not shown."""
        if self._cells is None:
            return
        shown = token_ids[: ROOM - self._length]
        begin = _TOKENS + self._length
        self._cells[begin : begin + len(shown)] = shown
        self._length += len(shown)
        self._cells[_LENGTH] = self._length

    def give_up(self) -> int:
        """Write no more: another line takes this one's place, whose number is returned."""
        self._cells = None
        return self._number


class SharedDraftReader:
    """The target's side of a buffer.

    Args:
        path: The buffer's file.
    """

    def __init__(self, path: Path) -> None:
        self._cells = _opened(path)

    def lines(self) -> list[ReadLine]:
        """The lines that are there, newest last."""
        used: Any = np.flatnonzero(self._cells[:, _LENGTH])
        return [ReadLine(self._cells[number].copy()) for number in used[np.argsort(self._cells[used, _NUMBER])]]


class ReadLine:
    """A line as it was at one moment.

    Attributes:
        prompt_length: Tokens of the prompt.
        prompt_sum: Their `checksum`.
        origin: Index, in prompt and reply, of the line's first token.
        token_ids: The line's tokens, shape (m,): the prefix's last ones and the draft's.
    """

    def __init__(self, cells: Ids) -> None:
        length = min(max(int(cells[_LENGTH]), 0), ROOM)
        self.prompt_length = int(cells[_PROMPT_LENGTH])
        self.prompt_sum = int(cells[_PROMPT_SUM])
        self.origin = int(cells[_ORIGIN])
        self.token_ids: Ids = cells[_TOKENS : _TOKENS + length]


def _made(folders: Sequence[Path]) -> tuple[Path, int]:
    """A file with room for a buffer in the first folder that has it, and its lock."""
    for folder in folders:
        try:
            remove_stale(folder, _PREFIX)
            return create_locked(partial(_file_in, folder))
        except OSError as error:
            reason = f"{folder}: {error.strerror}"
    raise EngineStartError(f"no file of shared memory can be made in {reason}")


def _file_in(folder: Path) -> str:
    handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    try:
        # Not by its length alone: where there is no room for it, writing to it would end this process.
        os.posix_fallocate(handle, 0, LINES * (_TOKENS + ROOM) * 4)
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(handle)
    return name


def _opened(path: Path) -> Ids:
    return np.memmap(path, dtype=np.int32, mode="r+", shape=(LINES, _TOKENS + ROOM))
