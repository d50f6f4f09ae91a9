"""vLLM's processes: spawned each with its own environment, found, and ended; and files that outlive killed ones."""

from __future__ import annotations

import atexit
import fcntl
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psutil

from lookahead_agent.errors import EngineError

logger = logging.getLogger(__name__)

PARENT = "LOOKAHEAD_AGENT_PARENT"
"""Environment variable of vLLM's processes: the number of the process that has started them."""
_SPAWN: Callable[..., int] = util.spawnv_passfds
_SOCKETS = "la-sockets"
"""How a folder of sockets is named: as short as "lookahead-", and as nothing else."""
_LONGEST_FOLDER = 50
"""Characters: with a folder of ours and vLLM's name of a socket behind it, that is what a socket's address holds."""
_staying: set[int] = set()
_pausing = threading.Lock()
_pauses = 0
_was_enabled = False


def available_cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


class _Own(NamedTuple):
    """What one engine's processes are spawned with, and no other's."""

    environment: Mapping[str, str]
    when_spawned: Callable[[], None] | None


_own: ContextVar[_Own | None] = ContextVar("_own", default=None)


class Spawner:
    """Spawns the engines that are starting in this process, and leaves nothing of those that fail.

    vLLM takes much from the environment only, such as its CPU cores, and engines that start together have one
    environment to inherit. So what is one engine's alone is in the environment while its process is spawned, one
    process at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._replaced = ExitStack()
        self._before: set[psutil.Process] = set()
        self._kept: set[psutil.Process] = set()
        self._failed = False
        self._spawning = threading.Lock()
        self._refused = False

    def refuse(self) -> None:
        """Let no further process be spawned; those that have been can be seen among this one's when it returns."""
        with self._spawning:
            self._refused = True

    def _spawn(self, path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        own = _own.get() or _Own({}, None)
        with self._spawning:
            if self._refused:
                raise EngineError("the process is shutting down")
            with _environment(own.environment):
                process = _SPAWN(path, arguments, descriptors)
        if own.when_spawned is not None and "--multiprocessing-fork" in arguments:  # and not Python's resource tracker
            own.when_spawned()
        return process

    @contextmanager
    def starting(
        self, environment: Mapping[str, str] | None = None, when_spawned: Callable[[], None] | None = None
    ) -> Iterator[set[psutil.Process]]:
        """Start an engine within this context; put the processes that are to stay into the yielded set.

        Args:
            environment: Variables of this engine's processes.
            when_spawned: Called when its process is there, and all is done here but waiting for the engine.
        """
        with self._lock:
            if self._number == 0:
                self._before = worker_processes()
                self._replaced.enter_context(_quiet_environment())
                self._replaced.enter_context(_main_module_replaced())
                setattr(util, "spawnv_passfds", self._spawn)  # noqa: B010
                self._replaced.callback(setattr, util, "spawnv_passfds", _SPAWN)
            self._number += 1
        kept: set[psutil.Process] = set()
        failed = True
        token = _own.set(_Own(environment or {}, when_spawned))
        try:
            yield kept
            failed = False
        finally:
            _own.reset(token)
            with self._lock:
                self._number -= 1
                self._kept |= kept
                self._failed |= failed
                if self._number == 0:
                    self._end()

    def _end(self) -> None:
        self._replaced.close()
        # Which processes belong to none can only be told once no other engine is starting.
        if self._failed:
            kill_processes(worker_processes() - self._before - self._kept)
        self._failed = False
        self._before, self._kept = set(), set()


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


@contextmanager
def _quiet_environment() -> Iterator[None]:
    """The environment of vLLM here and in its processes: quiet unless the user wants a log."""
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        # vLLM logs to stdout, which belongs to the program's own output.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_RPC_BASE_PATH": _folder_of_sockets(),
        # On a GPU vLLM would fork, which a process of many threads must not, and which none of the above reaches.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Python's tracker frees what killed processes leave, and would say so.
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    }
    missing = {name: value for name, value in quiet.items() if name not in os.environ}
    if "VLLM_LOGGING_LEVEL" in missing:
        logging.getLogger("vllm").setLevel(logging.ERROR)
    # A parent of this process may have set its own number, if this is itself such a worker.
    with _environment(missing | {PARENT: str(os.getpid())}):
        yield


@cache
def _folder_of_sockets() -> str:
    """Where vLLM's processes meet; removed with all that is in it when this process ends, for vLLM leaves it there.

    A process that is killed leaves it, too: the next one removes it.
    """
    if len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        return tempfile.gettempdir()
    remove_stale(Path(tempfile.gettempdir()), _SOCKETS)
    folder, _ = create_locked(partial(tempfile.mkdtemp, prefix=_SOCKETS))
    atexit.register(_remove_own, folder, os.getpid())
    return str(folder)


os.register_at_fork(after_in_child=_folder_of_sockets.cache_clear)


def _remove_own(folder: Path, process: int) -> None:
    """Remove a folder that this process has made, and not one that was forked from it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _main_module_replaced() -> Iterator[None]:
    """Have spawned workers import `worker_main` in place of the user's script."""
    main = sys.modules["__main__"]
    stand_in = ModuleType("__main__")
    stand_in.__spec__ = find_spec("lookahead_agent.engines.worker_main")
    sys.modules["__main__"] = stand_in
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector; if it was enabled, it is again when the last of several pauses ends.

    Importing vLLM makes a million objects, all of which stay. The collector looks through them again and again, which
    takes a third of the time; so it does while a tokenizer is read.
    """
    global _pauses, _was_enabled
    with _pausing:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _pausing:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def create_locked(create: Callable[[], str]) -> tuple[Path, int]:
    """Create a file or a folder that `remove_stale` leaves alone until its lock is closed.

    Args:
        create: Creates it and returns its path.

    Returns:
        The path, and the descriptor that holds the lock; the system closes it however this process ends.
    """
    while True:
        path = Path(create())
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if path.exists():  # else another process has removed it before it was locked
            return path, descriptor
        os.close(descriptor)


def remove_stale(folder: Path, prefix: str) -> None:
    """Remove what killed processes of this user have left: files and folders that nobody locks.

    Args:
        folder: Where they are.
        prefix: How their names begin, and no others.
    """
    for path in folder.glob(f"{prefix}*"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # it is gone, or is a link
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        except BlockingIOError:
            logger.debug("%s is in use", path)
        finally:
            os.close(descriptor)


def leave_running(pid: int) -> None:
    """Say that a process which this one has started is to outlive it."""
    _staying.add(pid)


def end_processes(processes: Iterable[psutil.Process], patience: float = 3.0) -> None:
    """Terminate processes and wait for them; those still there after `patience` seconds are killed."""
    processes = list(processes)
    _send(signal.SIGTERM, processes)
    _, alive = psutil.wait_procs(processes, timeout=patience)
    kill_processes(alive, patience)


def kill_processes(processes: Iterable[psutil.Process], patience: float = 3.0) -> None:
    """Kill processes and wait for them, up to `patience` seconds.

    vLLM's processes take no other signal while they start. The oldest go first: they have started the others, and would
    complain of their end.
    """
    processes = sorted(processes, key=psutil.Process.create_time)
    _send(signal.SIGKILL, processes)
    psutil.wait_procs(processes, timeout=patience)


def _send(sign: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(sign)
        except psutil.NoSuchProcess:
            logger.debug("process %d had already ended", process.pid)


def worker_processes() -> set[psutil.Process]:
    """Processes that were started by `multiprocessing`, as vLLM does, and theirs.

    The user's program may start others, possibly just now, which are not ours to end.
    """
    # Until a process has read what it is for, `multiprocessing` does not list it.
    spawned = (child for child in psutil.Process().children() if "--multiprocessing-fork" in _command(child))
    return families([*(worker.pid for worker in multiprocessing.active_children()), *(child.pid for child in spawned)])


def families(parents: Iterable[int | None]) -> set[psutil.Process]:
    """The processes of these numbers that have not ended, and those that they have started."""
    found: set[psutil.Process] = set()
    for parent in parents:
        try:
            process = psutil.Process(parent)
            found |= {process, *process.children(recursive=True)}
        except psutil.NoSuchProcess:
            logger.debug("process %d had already ended", parent)
    return found


def child_processes() -> set[psutil.Process]:
    """Processes that this one has started, and theirs, but for those that are to outlive it.

    Python's resource tracker is left out, too: it ends alone after the others, and complains if it is ended before.
    """
    found = families(child.pid for child in psutil.Process().children() if child.pid not in _staying)
    return {process for process in found if not any("resource_tracker" in word for word in _command(process))}


def _command(process: psutil.Process) -> list[str]:
    """The words of a process's command; none if it has ended, or is another user's."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
