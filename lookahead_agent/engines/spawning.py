"""What vLLM's processes are spawned with, also while several engines start at the same time."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from lookahead_agent.engines.leftovers import made_and_locked, remove_leftovers
from lookahead_agent.engines.processes import PARENT, WAIT_WITHOUT_A_CORE, kill_processes, worker_processes
from lookahead_agent.errors import EngineError

_SPAWN: Callable[..., int] = util.spawnv_passfds
_SOCKETS = "la-sockets"
"""How a folder of sockets is named: as short as "lookahead-", and as nothing else."""
_LONGEST_FOLDER = 50
"""Characters: with a folder of ours and vLLM's name of a socket behind it, that is what a socket's address holds."""


class Cores(str):
    """CPU cores in vLLM's notation, which bind the process that unpickles them.

    vLLM takes cores from the environment only, and engines that start together have one environment to inherit. What
    is theirs alone is their configuration, which vLLM pickles for them.

    Args:
        cores: Such as "0-2,5".
        when_sent: Called when they are pickled, which is when all is done here but waiting for the engine.
    """

    _when_sent: Callable[[], None] | None

    def __new__(cls, cores: str, when_sent: Callable[[], None] | None = None) -> Cores:
        """Make the text, and remember whom to tell."""
        made = super().__new__(cls, cores)
        made._when_sent = when_sent
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self._when_sent is not None:
            self._when_sent()
        return _bound_to, (str(self),)

    def __deepcopy__(self, _: object) -> Cores:
        return self  # a copy within one process binds nothing


def _bound_to(cores: str) -> Cores:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    return Cores(cores)


class Setting(str):
    """`NAME=value` in the environment of a process that unpickles it, unless the user has set it there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _set, (str(self),)

    def __deepcopy__(self, _: object) -> Setting:
        return self


def _set(setting: str) -> Setting:
    name, _, value = setting.partition("=")
    os.environ.setdefault(name, value)
    return Setting(setting)


class Imported(str):
    """Name of a module that a process which unpickles it imports, for what the module makes known to vLLM."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, (str(self),)

    def __deepcopy__(self, _: object) -> Imported:
        return self


def _imported(module: str) -> Imported:
    import_module(module)
    return Imported(module)


class Starts:
    """The engines that are starting in this process: one environment for all, and nothing left of those that fail."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._replaced = ExitStack()
        self._before: set[psutil.Process] = set()
        self._kept: set[psutil.Process] = set()
        self._failed = False
        self._spawning = threading.Lock()
        self._refused = False
        self._of_thread = threading.local()

    def refuse(self) -> None:
        """Let no further process be spawned; those that have been can be seen among this one's when it returns."""
        with self._spawning:
            self._refused = True

    def _spawn(self, *arguments: Any) -> int:
        with self._spawning:
            if self._refused:
                raise EngineError("the process is shutting down")
            process = _SPAWN(*arguments)
        spawned = getattr(self._of_thread, "spawned", None)
        if spawned is not None and "resource_tracker" not in str(arguments):  # Python's own process, started before
            spawned()
        return process

    @contextmanager
    def starting(self, *, on_cpu: bool, spawned: Callable[[], None] | None = None) -> Iterator[set[psutil.Process]]:
        """Start an engine within this context; put the processes that are to stay into the yielded set.

        Args:
            on_cpu: Whether it runs on a CPU.
            spawned: Called when the engine's process has been spawned: its configuration is pickled by then.
        """
        self._of_thread.spawned = spawned
        with self._lock:
            if self._number == 0:
                self._before = worker_processes()
                self._replaced.enter_context(_environment(on_cpu=on_cpu))
                self._replaced.enter_context(_main_module_replaced())
                self._replaced.enter_context(_spawned_by(self._spawn))
            self._number += 1
        kept: set[psutil.Process] = set()
        failed = True
        try:
            yield kept
            failed = False
        finally:
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
def _environment(*, on_cpu: bool) -> Iterator[None]:
    """The environment in which workers are spawned: quiet unless the user wants a log."""
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
        PARENT: str(os.getpid()),
        # Python's tracker frees what killed processes leave, and would say so.
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    }
    if on_cpu:
        quiet[WAIT_WITHOUT_A_CORE] = "1"
    # What a parent of this process has set, if it is itself such a worker, is not meant for its own workers.
    wanted = {name: value for name, value in quiet.items() if name == PARENT or name not in os.environ}
    os.environ.update(wanted)
    if "VLLM_LOGGING_LEVEL" in wanted:
        logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)


@cache
def _folder_of_sockets() -> str:
    """Where vLLM's processes meet; removed with all that is in it when this process ends, for vLLM leaves it there.

    A process that is killed leaves it, too: the next one removes it.
    """
    if len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        return tempfile.gettempdir()
    remove_leftovers(Path(tempfile.gettempdir()), _SOCKETS)
    folder, _ = made_and_locked(partial(tempfile.mkdtemp, prefix=_SOCKETS))
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
def _spawned_by(spawn: Callable[..., int]) -> Iterator[None]:
    """Have `multiprocessing` spawn workers by a function of ours."""
    util.spawnv_passfds = spawn
    try:
        yield
    finally:
        util.spawnv_passfds = _SPAWN
