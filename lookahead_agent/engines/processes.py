"""vLLM's processes: spawned each with its own environment, found, ended, and why they have ended."""

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

PARENT = "LOOKAHEAD_AGENT_PARENT"  # variable of vLLM's processes: the number of the one that has started them
_LONGEST_FOLDER = 45  # characters of a folder for temporary files in which a socket's address has room
_SPAWN: Callable[..., int] = util.spawnv_passfds
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vLLM logs to stdout, which belongs to the program's own output.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # On a GPU vLLM would fork, which a process of many threads must not, and which none of the above reaches.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Python's tracker frees what killed processes leave, and would say so.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
}
"""Of vLLM here and in its processes, unless the user wants a log."""
ADVICE = (
    "lower kv_cache_memory_bytes, max_model_len or max_num_seqs in engine_args (gpu_memory_utilization on a GPU), take "
    "precision int8-weights or a smaller model, or end what else runs"
)

_AT_START = re.compile(r"Failed core proc\(s\):.*(?<!\d)-9\b")
SHARED = Path("/dev/shm")  # memory that processes share by files, on Linux
_SHARED_BYTES = 240 << 20  # free, or vLLM makes no queue between its processes, although it uses kilobytes of them
_GROUP = Path("/sys/fs/cgroup")
_staying: set[int] = set()
_starting: set[int] = set()  # numbers of processes whose engines are starting
_spawning = threading.Lock()
_refused = False


def available_cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@contextmanager
def spawning(environment: Mapping[str, str], when_spawned: Callable[[], None] | None = None) -> Iterator[list[int]]:
    """Start an engine from this thread within this context, one engine at a time; yields its processes' numbers.

    Spawned processes have the variables of `environment`, and import `worker_main` in place of the user's script.
    `when_spawned` is called when all is done here but waiting for the engine; it may leave this context.
    """
    thread, numbers = threading.get_ident(), list[int]()

    def spawn(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        # Python's resource tracker, and what the user's own threads spawn, are no processes of the engine.
        if threading.get_ident() != thread or "--multiprocessing-fork" not in arguments:
            return _SPAWN(path, arguments, descriptors)
        with _spawning:
            if _refused:
                raise EngineError("the process is shutting down")
            numbers.append(_SPAWN(path, arguments, descriptors))
            _starting.add(numbers[-1])
        if when_spawned is not None:
            when_spawned()
        return numbers[-1]

    quiet = {name: value for name, value in _QUIET.items() if name not in os.environ}
    if "VLLM_LOGGING_LEVEL" in quiet:
        logging.getLogger("vllm").setLevel(logging.ERROR)
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        quiet["VLLM_RPC_BASE_PATH"] = _folder_of_sockets(os.getpid())
    main, stand_in = sys.modules["__main__"], ModuleType("__main__")
    stand_in.__spec__ = find_spec("lookahead_agent.engines.worker_main")
    # A parent of this process may have set its own number, if this is itself such a worker.
    with _environment({**quiet, PARENT: str(os.getpid()), **environment}):
        sys.modules["__main__"] = stand_in
        setattr(util, "spawnv_passfds", spawn)  # noqa: B010
        try:
            yield numbers
        finally:
            setattr(util, "spawnv_passfds", _SPAWN)  # noqa: B010
            sys.modules["__main__"] = main


def end_start(numbers: Iterable[int], *, failed: bool) -> None:
    """Say that the engine of these processes has started, or has failed, which kills them."""
    if failed:
        kill_processes(families(numbers))
    _starting.difference_update(numbers)


def refuse_starts() -> None:
    """Let no engine's process be spawned any more, and kill those whose engines are starting."""
    global _refused
    with _spawning:
        _refused = True
    kill_processes(families(list(_starting)))  # other threads go on changing it


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _folder_of_sockets(process: int) -> str:
    """Where vLLM's processes meet, which it leaves behind: removed when this process ends."""
    if len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        return tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="la-")

    def remove() -> None:
        if os.getpid() == process:  # and not one that was forked from it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


os.register_at_fork(after_in_child=_starting.clear)  # the parent's


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which takes a third of vLLM's import; not in two threads at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_running(pid: int) -> None:
    """Say that a process which this one has started is to outlive it."""
    _staying.add(pid)


def end_processes(processes: Iterable[psutil.Process], patience: float = 3.0) -> None:
    """Terminate processes and wait for them; those still there after `patience` seconds are killed."""
    processes = list(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=patience)
    kill_processes(alive, patience)


def kill_processes(processes: Iterable[psutil.Process], patience: float = 3.0) -> None:
    """Kill processes, the oldest first, which have started the others, and wait up to `patience` seconds."""
    processes = sorted(processes, key=psutil.Process.create_time)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=patience)


def families(parents: Iterable[int | None]) -> set[psutil.Process]:
    """The processes of these numbers that have not ended, and those that they have started."""
    found: set[psutil.Process] = set()
    for parent in parents:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(parent)
            found |= {process, *process.children(recursive=True)}
    return found


def child_processes() -> set[psutil.Process]:
    """Processes that this one and they have started, but for those that outlive it and the resource tracker."""
    found = families(child.pid for child in psutil.Process().children() if child.pid not in _staying)
    return {process for process in found if not any("resource_tracker" in word for word in _command(process))}


def _command(process: psutil.Process) -> list[str]:
    """The words of a process's command; none if it has ended, or is another user's."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# Why they have ended


def explain(processes: Sequence[BaseProcess]) -> str:
    """Why an engine of these processes of vLLM's does not work any more; blocks for up to two seconds for each."""
    for process in processes:
        process.join(2.0)
    codes = [process.exitcode for process in processes]
    signals = [signal.Signals(-code).name for code in codes if code is not None and code < 0]
    if "SIGKILL" in signals:
        return _killed()
    if "SIGBUS" in signals:
        return f"its process found {SHARED} full (SIGBUS): make it larger (--shm-size=1g for a container)"
    if signals:
        return f"its process was ended by {signals[0]}"
    return (
        "its worker failed, or was killed, as systems do that run out of memory; the log says which "
        f"(VLLM_LOGGING_LEVEL=INFO). If it was memory ({_free()}): {ADVICE}"
    )


def explain_start(error: Exception) -> str:
    """The same of an engine that did not start."""
    if _AT_START.search(str(error)):
        return _killed()
    if (problem := no_shared_memory()) is not None:
        return problem
    lines = [line.strip() for line in str(error).splitlines() if "errors.pydantic.dev" not in line]
    reason = list(filter(None, lines)) or [type(error).__name__]
    return f"{reason[-1]} (VLLM_LOGGING_LEVEL=INFO shows its log; if it was memory, {ADVICE})"


def _killed() -> str:
    return f"its process was killed, as systems do that run out of memory ({_free()}): {ADVICE}"


def _free() -> str:
    total, free = memory()
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free now"


def memory(group: Path = _GROUP) -> tuple[int, int]:
    """Bytes of memory that this process and its children may use in all, by a container's limit too, and free ones."""
    machine = psutil.virtual_memory()
    limit = _number(group / "memory.max") or _number(group / "memory" / "memory.limit_in_bytes")
    if limit is None or limit >= machine.total:
        return machine.total, machine.available
    used = _number(group / "memory.current") or _number(group / "memory" / "memory.usage_in_bytes") or 0
    return limit, max(0, min(machine.available, limit - used))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there, or "max"
        return None


def no_shared_memory(folder: Path = SHARED) -> str | None:
    """Why vLLM's processes cannot exchange what they have to by shared memory; None: they can, or one cannot tell."""
    if os.uname().sysname != "Linux":
        return None
    advice = "start the container with --shm-size=1g or --ipc=host, or mount a tmpfs there"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return f"there is no {folder}, in which vLLM's processes share memory: {advice}"
    if not os.access(folder, os.W_OK):
        return f"{folder}, in which vLLM's processes share memory, cannot be written: {advice}"
    if free < _SHARED_BYTES:
        return (
            f"{folder}, in which vLLM's processes share memory, has {free >> 20} MiB free, and vLLM asks for "
            f"{_SHARED_BYTES >> 20}: {advice}"
        )
    return None
