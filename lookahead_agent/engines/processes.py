"""vLLM's processes: spawn them in an environment of their own, find and end them, and explain why they ended."""

import atexit
import gc
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from lookahead_agent.errors import EngineError

PARENT = "LOOKAHEAD_AGENT_PARENT"  # variable of vLLM's processes: the pid of the process that started them
_MAX_FOLDER_LENGTH = 45  # characters of the temporary folder's path that leave room for a socket's name
_ORIGINAL_SPAWN: Callable[..., int] = util.spawnv_passfds
_QUIET_VARIABLES = {
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
"""Variables for vLLM in this process and its own; a value set by the user stays."""
ADVICE = (
    "lower kv_cache_memory_bytes, max_model_len or max_num_seqs in engine_args (gpu_memory_utilization on a GPU), take "
    "precision int8 or a smaller model, or end what else runs"
)

_KILLED_AT_START = re.compile(r"Failed core proc\(s\):.*(?<!\d)-9\b")
SHARED = Path("/dev/shm")  # folder of shared memory on Linux
_MIN_SHARED_BYTES = 240 << 20  # free bytes that vLLM requires for a queue, of which it uses kilobytes
_CGROUP = Path("/sys/fs/cgroup")
_detached: set[int] = set()
_starting: set[int] = set()  # pids of processes whose engines are starting
_spawn_lock = threading.Lock()
_starts_refused = False


def available_cores() -> list[int]:
    """The CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@contextmanager
def spawning(environment: Mapping[str, str], on_spawn: Callable[[], None] | None = None) -> Iterator[list[int]]:
    """Start an engine from this thread within this context, one engine at a time; yield its processes' pids.

    Spawned processes get the variables of `environment`, and import `worker_main` in place of the user's script.
    `on_spawn` is called after each spawn; it may leave this context if only waiting for the engine remains.
    """
    starting_thread, pids = threading.get_ident(), list[int]()

    def spawn(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        # Python's resource tracker and processes spawned by the user's threads do not belong to the engine.
        if threading.get_ident() != starting_thread or "--multiprocessing-fork" not in arguments:
            return _ORIGINAL_SPAWN(path, arguments, descriptors)
        with _spawn_lock:
            if _starts_refused:
                raise EngineError("the process is shutting down")
            pids.append(_ORIGINAL_SPAWN(path, arguments, descriptors))
            _starting.add(pids[-1])
        if on_spawn is not None:
            on_spawn()
        return pids[-1]

    defaults = {name: value for name, value in _QUIET_VARIABLES.items() if name not in os.environ}
    if "VLLM_LOGGING_LEVEL" in defaults:
        logging.getLogger("vllm").setLevel(logging.ERROR)
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        defaults["VLLM_RPC_BASE_PATH"] = _socket_folder(os.getpid())
    user_main, replacement = sys.modules["__main__"], ModuleType("__main__")
    replacement.__spec__ = find_spec("lookahead_agent.engines.worker_main")
    # PARENT may already be set: if this process is itself a worker, to the pid of its parent.
    with _environment({**defaults, PARENT: str(os.getpid()), **environment}):
        sys.modules["__main__"] = replacement
        setattr(util, "spawnv_passfds", spawn)  # noqa: B010
        try:
            yield pids
        finally:
            setattr(util, "spawnv_passfds", _ORIGINAL_SPAWN)  # noqa: B010
            sys.modules["__main__"] = user_main


def finish_start(pids: Iterable[int], *, failed: bool) -> None:
    """Record that the engine of these processes has started; if its start failed, kill them."""
    if failed:
        kill_processes(process_trees(pids))
    _starting.difference_update(pids)


def refuse_starts() -> None:
    """Refuse to spawn engine processes from now on, and kill those whose engines are starting."""
    global _starts_refused
    with _spawn_lock:
        _starts_refused = True
    kill_processes(process_trees(list(_starting)))  # a copy, since other threads change it


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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


os.register_at_fork(after_in_child=_starting.clear)  # they belong to the parent


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


def crash_reason(processes: Sequence[BaseProcess]) -> str:
    """Explain why an engine with these vLLM processes failed; blocks for up to two seconds per process."""
    for process in processes:
        process.join(2.0)
    codes = [process.exitcode for process in processes]
    signals = [signal.Signals(-code).name for code in codes if code is not None and code < 0]
    if "SIGKILL" in signals:
        return _killed_reason()
    if "SIGBUS" in signals:
        return f"its process found {SHARED} full (SIGBUS): make it larger (--shm-size=1g for a container)"
    if signals:
        return f"its process was ended by {signals[0]}"
    return (
        "its worker failed, or was killed, as systems do that run out of memory; the log says which "
        f"(VLLM_LOGGING_LEVEL=INFO). If it was memory ({_free_memory()}): {ADVICE}"
    )


def start_failure_reason(error: Exception) -> str:
    """Explain why an engine did not start."""
    if _KILLED_AT_START.search(str(error)):
        return _killed_reason()
    if (problem := shared_memory_problem()) is not None:
        return problem
    lines = [line.strip() for line in str(error).splitlines() if "errors.pydantic.dev" not in line]
    reason = list(filter(None, lines)) or [type(error).__name__]
    return f"{reason[-1]} (VLLM_LOGGING_LEVEL=INFO shows its log; if it was memory, {ADVICE})"


def _killed_reason() -> str:
    return f"its process was killed, as systems do that run out of memory ({_free_memory()}): {ADVICE}"


def _free_memory() -> str:
    total, free = memory()
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free now"


def memory(group: Path = _CGROUP) -> tuple[int, int]:
    """Bytes of memory that this process and its children may use, and free bytes, both within a container's limit."""
    machine = psutil.virtual_memory()
    limit = _read_integer(group / "memory.max") or _read_integer(group / "memory" / "memory.limit_in_bytes")
    if limit is None or limit >= machine.total:
        return machine.total, machine.available
    used = _read_integer(group / "memory.current") or _read_integer(group / "memory" / "memory.usage_in_bytes") or 0
    return limit, max(0, min(machine.available, limit - used))


def _read_integer(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # missing, or "max"
        return None


def shared_memory_problem(folder: Path = SHARED) -> str | None:
    """Why vLLM's processes cannot exchange data through shared memory; None if they can, or not on Linux."""
    if os.uname().sysname != "Linux":
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
