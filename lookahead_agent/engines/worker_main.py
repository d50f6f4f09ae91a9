"""The main module of vLLM's worker processes, in place of the user's script.

vLLM spawns its workers, and a spawned Python first imports its parent's main module. A user's script would run a second
time without an `if __name__ == "__main__"` guard, so this module replaces it. It also keeps the worker quiet, shortens
its start and exit, and kills it when its parent ends for any reason.
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


def _kill_with_parent(parent: int) -> None:
    """Kill this process as soon as `parent` has ended, even if `parent` was killed."""
    with suppress(ProcessLookupError):  # the parent has already ended
        select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_pid() -> int:
    """The parent's pid, from the environment: once the parent has died, `getppid` returns another process."""
    pid = int(os.environ.get(PARENT) or os.getppid())
    os.environ[PARENT] = str(os.getpid())  # for child processes of this process
    return pid


def _silence_early_eof() -> None:
    """Print no traceback if the parent ends before it has sent this process its task."""
    print_exception = sys.excepthook
    sys.excepthook = lambda kind, error, trace: None if kind is EOFError else print_exception(kind, error, trace)


def _shorten_start_and_exit() -> None:
    """Collect garbage only once the work starts, and end this process right after its exit handlers.

    Collection takes a third of the time of vLLM's imports, and interpreter teardown takes seconds.
    """
    gc.disable()
    bootstrap = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def bootstrap_and_exit(process: BaseProcess, *arguments: Any) -> None:
        gc.freeze()
        gc.enable()
        code = bootstrap(process, *arguments)
        atexit._run_exitfuncs()
        os._exit(code)

    BaseProcess._bootstrap = bootstrap_and_exit  # type: ignore[attr-defined]


if __name__ == "__mp_main__":
    _silence_early_eof()
    _shorten_start_and_exit()
    # Until vLLM sets up its logging, a library's warnings would go to the terminal.
    if "VLLM_LOGGING_LEVEL" in os.environ:
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", category=FutureWarning)
    if hasattr(os, "pidfd_open"):
        threading.Thread(target=_kill_with_parent, args=(_parent_pid(),), daemon=True).start()
