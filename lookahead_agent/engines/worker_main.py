"""The main module of a starter (`starter`), which starts vLLM's processes, and of these.

vLLM spawns its processes, and a spawned Python first imports its parent's main module. A user's script would run a
second time without an `if __name__ == "__main__"` guard, so this module starts them. It also keeps them quiet, shortens
their start and exit, and kills them when their parent ends for any reason.

On a CPU nothing is imported twice: the starter imports vLLM, an engine's launcher is forked from it, and the engine
core, which is its own worker, from the launcher.
"""

import atexit
import gc
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn
from weakref import finalize

from lookahead_agent.cpu import VARIABLE
from lookahead_agent.engines import child_watch
from lookahead_agent.engines.processes import PARENT
from lookahead_agent.errors import ConfigurationError

_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def _kill_with_parent(parent: int) -> None:
    """Kill this process as soon as `parent` has ended, even if `parent` was killed."""
    with suppress(ProcessLookupError):  # the parent has already ended
        select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_pid() -> int:
    """The parent's pid, from the environment: once the parent has died, `getppid` returns another process."""
    pid = int(os.environ.get(PARENT) or os.getppid())
    os.environ[PARENT] = str(os.getpid())  # the parent of this process's child processes
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

    def bootstrap_and_exit(process: BaseProcess, *arguments: Any, **named: Any) -> None:
        gc.freeze()
        gc.enable()
        code = bootstrap(process, *arguments, **named)
        atexit._run_exitfuncs()
        os._exit(code)

    BaseProcess._bootstrap = bootstrap_and_exit  # type: ignore[attr-defined]


def serve_starts(launch: Callable[..., tuple[list[int], Any]] | None = None) -> None:
    """Fork a process for each job that the owner sends to the socket in `argv`, and report its pid and exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the owner, which ends its engines
    control = socket.socket(fileno=int(sys.argv[1]))
    control.setblocking(True)
    os.set_inheritable(control.fileno(), False)
    _watch_parent()
    if VARIABLE in os.environ:
        with suppress(Exception):  # the engine's launcher imports it again, and reports the error
            _import_vllm()
    gc.freeze()
    ended, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ends: dict[int, int] = {}  # descriptors that take a process's exit code, by pid
    while True:
        ready, _, _ = select.select([control.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _report_ends(ends)
        if control.fileno() not in ready:
            continue
        _, (*descriptors,), _, _ = socket.recv_fds(control, 1, 3)
        if not descriptors:
            os._exit(0)
        job, answer, end = descriptors
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            for descriptor in (ended, wake_up, end, *ends.values()):
                os.close(descriptor)
            _start_engine(job, answer, launch or _launch)
        os.close(job)
        os.close(answer)
        ends[pid] = end
        _report(end, pid)


def _report_ends(ends: dict[int, int]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if (end := ends.pop(pid, None)) is not None:
            _report(end, os.waitstatus_to_exitcode(status))
            os.close(end)


def _report(end: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the owner no longer reads it
        os.write(end, b"%d\n" % number)


def _start_engine(job_file: int, answer_pipe: int, launch: Callable[..., tuple[list[int], Any]]) -> NoReturn:
    """Start vLLM's processes for a job, write an answer, and wait for them."""
    starter = _watch_parent()
    with os.fdopen(answer_pipe, "wb") as out:
        try:
            with os.fdopen(job_file, "rb") as file:
                sys.path[:], job = pickle.load(file)
            os.environ.update(job.pop("variables"))
            os.register_at_fork(after_in_child=partial(_become_child, [answer_pipe], job.pop("worker_cores")))
            pids, answer = launch(**job)
            content = bytes(ForkingPickler.dumps((True, answer)))
        except BaseException as error:
            refused = isinstance(error, ConfigurationError)
            out.write(pickle.dumps((False, {"message": str(error) or type(error).__name__, "is_refused": refused})))
            raise SystemExit(1) from None
        out.write(content)
    watch = (sys.executable, "-I", "-S", child_watch.__file__, str(starter), *map(str, pids))
    os.execv(sys.executable, watch)


def _import_vllm() -> None:
    """Import what an engine on a CPU needs; nothing here may compute, since OpenMP's threads do not survive a fork."""
    import vllm.engine.arg_utils
    import vllm.v1.engine.core
    import vllm.v1.executor
    import vllm.v1.worker.cpu_worker  # noqa: F401


def _launch(arguments: dict[str, Any], on_cpu: bool) -> tuple[list[int], dict[str, Any]]:
    """Start an engine's processes; returns their pids, and what a client of the engine needs."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
    from vllm.v1.engine.utils import (
        CoreEngineProcManager,
        EngineZmqAddresses,
        get_engine_zmq_bind_addresses,
        launch_core_engines,
    )
    from vllm.v1.executor import Executor

    if unknown := sorted(set(arguments) - set(AsyncEngineArgs.__dataclass_fields__)):
        raise ConfigurationError(f"vLLM has no engine argument {', '.join(unknown)}; see vllm.AsyncEngineArgs")
    if on_cpu:
        from lookahead_agent.cpu.plugin import register_names

        register_names()
    engine_args = AsyncEngineArgs(**arguments)
    config = engine_args.create_engine_config()
    maybe_register_config_serialize_by_value()
    bound = get_engine_zmq_bind_addresses(config)
    if any(address.startswith("tcp:") for address in (*bound.inputs, *bound.outputs)):
        raise ConfigurationError("an engine's processes must all run on this machine: serve it with vLLM, and base_url")
    addresses = EngineZmqAddresses(inputs=bound.inputs, outputs=bound.outputs)
    log_stats = not engine_args.disable_log_stats
    if on_cpu:
        os.environ[_START_METHOD] = "fork"
    with launch_core_engines(config, Executor.get_class(config), log_stats, addresses) as engines:
        pass  # leaving the context waits until the engine runs
    processes: list[BaseProcess] = []
    if isinstance(manager := engines.engine_manager, CoreEngineProcManager):
        processes += manager.processes
        manager._finalizer.detach()  # the processes outlive this object
    processes += [engines.coordinator.proc] if engines.coordinator is not None else []
    client_addresses = {"input_address": bound.inputs[0], "output_address": bound.outputs[0]}
    if engines.addresses.frontend_stats_publish_address is not None:
        client_addresses["stats_update_address"] = engines.addresses.frontend_stats_publish_address
    answer = {
        "vllm_config": config,
        "enable_log_requests": engine_args.enable_log_requests,
        "disable_log_stats": engine_args.disable_log_stats,
        "client_addresses": client_addresses,
    }
    return [process.pid for process in processes if process.pid is not None], answer


def _become_child(descriptors: list[int], worker_cores: list[int]) -> None:
    """Prepare a forked process: the engine core, on its cores if it is its own worker; other workers are spawned."""
    if descriptors:
        os.close(descriptors.pop())  # the owner reads the launcher's answer until all its copies are closed
        os.environ[_START_METHOD] = "spawn"
        if worker_cores:
            _bind_threads(worker_cores)
    # The parent's exit handlers would end this very process.
    atexit._clear()
    finalize._registry.clear()  # type: ignore[attr-defined]
    finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    _watch_parent()


def _bind_threads(cores: list[int]) -> None:
    """Give OpenMP one thread per core, each bound to its own; the first, which starts others, may run on all of them.

    vLLM does so by variables that OpenMP reads when it is loaded, which is before this process was forked.
    """
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    before = set(os.listdir("/proc/self/task"))
    torch.zeros(len(cores) << 16).add_(1)  # starts the threads
    threads = sorted(map(int, set(os.listdir("/proc/self/task")) - before))
    for thread, core in zip(threads, cores[1:], strict=False):
        os.sched_setaffinity(thread, {core})


def _watch_parent() -> int:
    """Kill this process when its parent ends, and return the parent's pid."""
    parent = _parent_pid()
    if hasattr(os, "pidfd_open"):
        threading.Thread(target=_kill_with_parent, args=(parent,), daemon=True).start()
    return parent


def _be_quiet() -> None:
    # Until vLLM sets up its logging, a library's warnings would go to the terminal.
    if "VLLM_LOGGING_LEVEL" in os.environ:
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", category=FutureWarning)


if __name__ == "__main__":
    _shorten_start_and_exit()
    _be_quiet()
    serve_starts()
elif __name__ == "__mp_main__":
    _silence_early_eof()
    _shorten_start_and_exit()
    _be_quiet()
    _watch_parent()
