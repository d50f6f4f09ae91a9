"""The main module of vLLM's worker processes, in place of the user's script.

vLLM spawns its workers, and a spawned Python first imports its parent's main module. With the user's script there, a
script without an `if __name__ == "__main__"` guard would start itself a second time. This module stands in for it,
and uses the moment to keep the worker quiet, to begin and to end it quickly, and to end it with its parent, however
that ends.
"""

import atexit
import gc
import logging
import os
import select
import signal
import sys
import threading
import warnings
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from lookahead_agent.engines.processes import PARENT


def _end_with(parent: int) -> None:
    """Kill this process as soon as `parent` has ended, also if it was killed and could not say goodbye."""
    with suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _parent() -> int:
    """Who has started this process: the environment's word, for one that was killed meanwhile is nobody's parent."""
    parent = int(os.environ.get(PARENT) or os.getppid())
    os.environ[PARENT] = str(os.getpid())  # for those that this one will start
    return parent


def _end_quietly_without_parent() -> None:
    """Say nothing where the parent has ended before it had sent what this process is for."""
    say = sys.excepthook
    sys.excepthook = lambda kind, error, trace: None if kind is EOFError else say(kind, error, trace)


def _begin_and_leave_quickly() -> None:
    """Look for garbage only once the work begins, and end this process after its exit handlers.

    Looking through all that vLLM imports takes a third of the time, and taking it apart at the end takes seconds.
    """
    gc.disable()
    work = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def work_and_leave(process: BaseProcess, *arguments: Any) -> None:
        gc.freeze()
        gc.enable()
        code = work(process, *arguments)
        atexit._run_exitfuncs()
        os._exit(code)

    BaseProcess._bootstrap = work_and_leave  # type: ignore[attr-defined]


if __name__ == "__mp_main__":
    _end_quietly_without_parent()
    _begin_and_leave_quickly()
    # Before vLLM has set up its own logging, a library's warnings would go to the terminal.
    if "VLLM_LOGGING_LEVEL" in os.environ:
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", category=FutureWarning)
    if hasattr(os, "pidfd_open"):
        threading.Thread(target=_end_with, args=(_parent(),), daemon=True).start()
