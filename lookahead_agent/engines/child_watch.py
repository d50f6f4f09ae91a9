"""The program that a starter of vLLM's processes becomes once they run: it ends as the first of them does.

It replaces the starter's process image by `exec`, which keeps the children and frees the memory of vLLM's modules. Its
arguments are the pid of the engine's owner and those of the children. It imports nothing of this library.
"""

import os
import select
import signal
import sys
import threading
from contextlib import suppress


def _end_with(parent: int) -> None:
    """End this process as soon as `parent` has ended; its children then end themselves."""
    with suppress(ProcessLookupError):  # the parent has already ended
        select.select([os.pidfd_open(parent)], [], [])
    os._exit(1)


def _forward(children: list[int], number: int) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, number)


def main() -> None:
    """Wait for the first child that ends, then end with its exit code or signal."""
    parent, *children = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: _forward(children, number))
    if hasattr(os, "pidfd_open"):
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    ended = 0
    while ended not in children:  # others are Python's resource tracker and helpers of vLLM
        ended, status = os.wait()
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no other action
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
