"""The main module of the process that starts vLLM's processes (`EngineProcess`), and of these.

vLLM spawns its processes, and a spawned Python first imports its parent's main module. A user's script would run a
second time without an `if __name__ == "__main__"` guard, so this module starts them. It also keeps them quiet, shortens
their start and exit, and kills them when their parent ends for any reason.

On a CPU the engine core is forked, as it needs what the starter has imported, and so is its worker if the starter's
environment has the worker's settings of OpenMP, which reads them when it is loaded.
"""

import atexit
import gc
import logging
import os
import pickle
import select
import signal
import sys
import threading
import warnings
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import finalize

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

    def bootstrap_and_exit(process: BaseProcess, *arguments: Any, **named: Any) -> None:
        gc.freeze()
        gc.enable()
        code = bootstrap(process, *arguments, **named)
        atexit._run_exitfuncs()
        os._exit(code)

    BaseProcess._bootstrap = bootstrap_and_exit  # type: ignore[attr-defined]


def start_engine() -> None:
    """Start vLLM's processes for the job in stdin, write an answer to the descriptor in `argv`, and wait for them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the owner, which ends its engines
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    owner = _watch_parent()
    with os.fdopen(descriptor, "wb") as out:
        try:
            job = pickle.load(sys.stdin.buffer)
            prepare_child = partial(_become_child, [descriptor], _unbind(cores := job.pop("cores")), cores)
            os.register_at_fork(after_in_child=prepare_child)
            pids, answer = _launch(**job)
            content = bytes(ForkingPickler.dumps((True, answer)))
        except BaseException as error:
            refused = isinstance(error, ConfigurationError)
            out.write(pickle.dumps((False, {"message": str(error) or type(error).__name__, "is_refused": refused})))
            raise SystemExit(1) from None
        out.write(content)
    watch = (sys.executable, "-I", "-S", child_watch.__file__, str(owner), *map(str, pids))
    os.execv(sys.executable, watch)


def _launch(arguments: dict[str, Any], on_cpu: bool) -> tuple[list[int], dict[str, Any]]:
    """Start an engine's processes; returns their pids, and what a client of the engine needs."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
    from vllm.v1.engine.utils import EngineZmqAddresses, get_engine_zmq_bind_addresses, launch_core_engines
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
    processes = [*getattr(engines.engine_manager, "processes", ())]
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
    return [process.pid for process in processes], answer


def _unbind(cores: list[int] | None) -> set[int]:
    """Let this thread run on `cores`, and return those to which OpenMP has bound it; None: it has not."""
    bound = os.sched_getaffinity(0) if cores else set()
    if cores:
        os.sched_setaffinity(0, cores)
    return bound


def _become_child(descriptors: list[int], worker_cores: set[int], cores: list[int] | None) -> None:
    """Prepare a forked process: the engine core, or then its worker, on its cores; `cores` None: it is spawned."""
    if descriptors:
        os.close(descriptors.pop())  # the owner reads the starter's answer until all its copies are closed
        os.environ[_START_METHOD] = "fork" if cores else "spawn"
        _unbind(cores)  # OpenMP binds a thread again when it first computes
    elif cores:
        os.sched_setaffinity(0, worker_cores)
    # The parent's exit handlers would end this very process.
    atexit._clear()
    finalize._registry.clear()  # type: ignore[attr-defined]
    finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    _watch_parent()


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
    start_engine()
elif __name__ == "__mp_main__":
    _silence_early_eof()
    _shorten_start_and_exit()
    _be_quiet()
    _watch_parent()
