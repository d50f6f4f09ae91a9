"""vLLM's processes: their variables, how to find and end them, and why they ended."""

import atexit
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from lookahead_agent.system.machine import memory

PARENT = "LOOKAHEAD_AGENT_PARENT"  # variable of vLLM's processes: the pid of the process that started them
_MAX_FOLDER_LENGTH = 45  # characters of the temporary folder's path that leave room for a socket's name
QUIET_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vLLM logs to stdout, which belongs to the program's own output.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # On a GPU vLLM would fork, which is unsafe with threads, and which none of the variables above would reach.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Python's resource tracker cleans up after killed processes, and would warn about it.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
}
"""Variables of vLLM's processes; a value set by the user stays."""
ADVICE = (
    "lower kv_cache_memory_bytes, max_model_len or max_num_seqs in engine_args (gpu_memory_utilization on a GPU), take "
    "precision int8 or a smaller model, or end what else runs"
)

_KILLED_AT_START = re.compile(r"Failed core proc\(s\):.*(?<!\d)-9\b")
SHARED = Path("/dev/shm")  # folder of shared memory on Linux
_MIN_SHARED_BYTES = 240 << 20  # free bytes that vLLM requires for a queue, of which it uses kilobytes
_detached: set[int] = set()


def socket_folder() -> str:
    """The folder for the sockets between this process and vLLM's; see `_socket_folder`."""
    return os.environ.get("VLLM_RPC_BASE_PATH") or _socket_folder(os.getpid())


@cache
def _socket_folder(creator: int) -> str:
    """The folder for vLLM's sockets, which vLLM leaves behind; a folder created here is removed at exit."""
    if len(tempfile.gettempdir()) > _MAX_FOLDER_LENGTH:
        return tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="la-")

    def remove() -> None:
        if os.getpid() == creator:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which takes a third of vLLM's import time; not for two threads at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def mark_detached(pid: int) -> None:
    """Mark a process that this one started as detached: it is to outlive this process."""
    _detached.add(pid)


def end_processes(processes: Iterable[psutil.Process], timeout: float = 3.0) -> None:
    """Terminate processes and wait for them; kill those still alive after `timeout` seconds."""
    processes = list(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    kill_processes(alive, timeout)


def kill_processes(processes: Iterable[psutil.Process], timeout: float = 3.0) -> None:
    """Kill processes, oldest first, since those started the others, and wait up to `timeout` seconds."""
    processes = sorted(processes, key=psutil.Process.create_time)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=timeout)


def process_trees(pids: Iterable[int | None]) -> set[psutil.Process]:
    """The existing processes with these pids, and all their descendants."""
    trees: set[psutil.Process] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            trees |= {process, *process.children(recursive=True)}
    return trees


def child_processes() -> set[psutil.Process]:
    """The descendants of this process, except detached processes and the resource tracker."""
    processes = process_trees(child.pid for child in psutil.Process().children() if child.pid not in _detached)
    return {process for process in processes if not any("resource_tracker" in word for word in _command_line(process))}


def _command_line(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended or belongs to another user."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# Reasons of crashes


def crash_reason(exit_code: int | None) -> str:
    """Explain why an engine failed whose process ended with this exit code; None: it runs, but a worker failed."""
    name = signal.Signals(-exit_code).name if exit_code is not None and exit_code < 0 else None
    if name == "SIGKILL":
        return _explain_kill()
    if name == "SIGBUS":
        return f"its process found {SHARED} full (SIGBUS): make it larger (--shm-size=1g for a container)"
    if name is not None:
        return f"its process was ended by {name}"
    return (
        "its worker failed, or was killed, as systems do that run out of memory; the log says which "
        f"(VLLM_LOGGING_LEVEL=INFO). If it was memory ({_free_memory()}): {ADVICE}"
    )


def start_failure_reason(error: Exception) -> str:
    """Explain why an engine did not start."""
    if _KILLED_AT_START.search(str(error)):
        return _explain_kill()
    if (problem := shared_memory_problem()) is not None:
        return problem
    lines = [line.strip() for line in str(error).splitlines() if "errors.pydantic.dev" not in line]
    reason = list(filter(None, lines)) or [type(error).__name__]
    return f"{reason[-1]} (VLLM_LOGGING_LEVEL=INFO shows its log; if it was memory, {ADVICE})"


def _explain_kill() -> str:
    return f"its process was killed, as systems do that run out of memory ({_free_memory()}): {ADVICE}"


def _free_memory() -> str:
    total, free = memory()
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free now"


def shared_memory_problem(folder: Path = SHARED) -> str | None:
    """Why vLLM's processes cannot exchange data through shared memory; None if they can, or not on Linux."""
    if sys.platform != "linux":
        return None
    advice = "start the container with --shm-size=1g or --ipc=host, or mount a tmpfs there"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return f"there is no {folder}, in which vLLM's processes share memory: {advice}"
    if not os.access(folder, os.W_OK):
        return f"{folder}, in which vLLM's processes share memory, cannot be written: {advice}"
    if free < _MIN_SHARED_BYTES:
        return (
            f"{folder}, in which vLLM's processes share memory, has {free >> 20} MiB free, and vLLM asks for "
            f"{_MIN_SHARED_BYTES >> 20}: {advice}"
        )
    return None
