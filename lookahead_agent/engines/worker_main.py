"""The main module of vLLM's worker processes, in place of the user's script.

vLLM spawns its workers, and a spawned Python first imports its parent's main module. With the user's script there, a
script without an `if __name__ == "__main__"` guard would start itself a second time. This module stands in for it,
and uses the moment to keep the worker quiet and to end it with its parent, however that ends.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import warnings


def _end_with(parent: int) -> None:
    """Kill this process as soon as `parent` has ended, also if it was killed and could not say goodbye."""
    select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__mp_main__":
    # Before vLLM has set up its own logging, a library's warnings would go to the terminal.
    if "VLLM_LOGGING_LEVEL" in os.environ:
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", category=FutureWarning)
    if hasattr(os, "pidfd_open"):
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
