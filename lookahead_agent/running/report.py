"""How far a keeper that starts has come, told to whoever started it: lines of JSON in a pipe."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import IO, Any

from lookahead_agent.progress import Progress, Task


class _ReportedTask:
    def __init__(self, report: StartReport, number: int) -> None:
        self._report = report
        self._number = number

    def advance(self, done: float) -> None:
        self._report.tell(task=self._number, done=done)


class StartReport:
    """The keeper's side; a `Progress`.

    Args:
        handle: File descriptor of the pipe; None: nobody listens.
    """

    def __init__(self, handle: int | None) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._pipe: IO[str] | None = None
        if handle is not None:
            os.set_inheritable(handle, False)  # or it would stay open in the engines' processes
            self._pipe = os.fdopen(handle, "w")

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        """Tell of one task."""
        with self._lock:
            number = next(self._numbers)
        self.tell(task=number, begins=description, total=total)
        yield _ReportedTask(self, number)
        self.tell(task=number, ends=True)

    def tell(self, **line: Any) -> None:
        """Tell a line."""
        with self._lock:
            if self._pipe is None:
                return
            try:
                self._pipe.write(json.dumps(line) + "\n")
                self._pipe.flush()
            except BrokenPipeError:  # nobody listens any more
                self._pipe = None

    def ready(self, pid: int) -> None:
        """Tell that all is there; the last that is told."""
        self.tell(ready=pid)
        with self._lock:
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()


def follow(lines: IO[str], progress: Progress) -> int | None:
    """Show what a keeper reports until it is ready.

    Args:
        lines: The other end of its pipe.
        progress: Shows the tasks.

    Returns:
        The keeper's process id; None if it ended before it was ready.
    """
    with ExitStack() as at_the_end:
        tasks: dict[int, tuple[Task, ExitStack]] = {}
        for line in map(json.loads, lines):
            match line:
                case {"ready": pid}:
                    return int(pid)
                case {"task": number, "begins": description, "total": total}:
                    lasting = at_the_end.enter_context(ExitStack())
                    tasks[number] = lasting.enter_context(progress.task(description, total)), lasting
                case {"task": number, "done": done}:
                    tasks[number][0].advance(done)
                case {"task": number, "ends": True}:
                    tasks.pop(number)[1].close()
    return None
