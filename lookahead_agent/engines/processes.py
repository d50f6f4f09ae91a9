"""Processes that vLLM starts: finding them, and ending them."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Iterable, Iterator

import psutil

logger = logging.getLogger(__name__)

WAIT_WITHOUT_A_CORE = "LOOKAHEAD_AGENT_WAIT_WITHOUT_A_CORE"
"""Environment variable of the processes of engines on a CPU: see `worker_main`."""
PARENT = "LOOKAHEAD_AGENT_PARENT"
"""Environment variable of vLLM's processes: the number of the process that has started them."""


_staying: set[int] = set()


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

    What the user's program starts otherwise, possibly just now, is not ours to end.
    """
    return families([*(worker.pid for worker in multiprocessing.active_children()), *_just_spawned()])


def _just_spawned() -> Iterator[int]:
    """Children to which `multiprocessing` is still sending what they are for: until then it does not list them."""
    for child in psutil.Process().children():
        try:
            if "--multiprocessing-fork" in child.cmdline():
                yield child.pid
        except psutil.Error:  # it has ended
            continue


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
    """Processes that this one has started, and theirs, but for Python's resource tracker.

    The tracker ends by itself after the others; ended before them it complains about what they did not give back. And
    what is to outlive this process is left out.
    """
    own = [child for child in psutil.Process().children() if child.pid not in _staying]
    return {process for process in _with_children(own) if not _is_resource_tracker(process)}


def _with_children(processes: Iterable[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        yield process
        try:
            yield from process.children(recursive=True)
        except psutil.NoSuchProcess:
            logger.debug("process %d had already ended", process.pid)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:  # it has ended, or is another user's
        return False
