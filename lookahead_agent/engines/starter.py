"""Start vLLM's processes from starters: processes that have imported vLLM once and fork it for every engine."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from typing import IO, Any

import psutil

from lookahead_agent.engines.processes import (
    PARENT,
    QUIET_VARIABLES,
    kill_processes,
    process_trees,
    socket_folder,
)
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.system.background import describe

_PROGRAM = "import runpy; runpy.run_module('lookahead_agent.engines.worker_main', run_name='__main__', alter_sys=True)"
_MAX_IDLE = 2  # starters without engines, half a gigabyte each, that `keep_starters` keeps
_UNREAD = frozenset({"PYTEST_CURRENT_TEST"})  # variables that no engine reads, and that change from start to start
_SET_BY_IMPORT = ("CUDA_", "KMP_", "LD_LIBRARY_PATH", "PYTORCH_", "TILELANG_", "TORCH", "TRITON_", "VLLM_")
_lock = threading.RLock()
_before_import: dict[str, str] | None = None  # the environment, while vLLM is imported
_starters: dict[Hashable, "_Starter"] = {}  # starters by what they began with, the latest used last
_starting: set["EngineProcess"] = set()
_keeping = 0  # contexts of `keep_starters`
_starts_refused = False


class StartError(Exception):
    """An engine's processes did not start; `is_refused` says that the arguments are invalid."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class _Starter:
    """A process of `worker_main.serve_starts`, and the engines that it has forked."""

    def __init__(self, command: list[str], variables: Mapping[str, str]) -> None:
        self.engines: set[EngineProcess] = set()
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [*command, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=variables
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def fork(self, job: int, answer: int, end: int) -> None:
        """Ask for an engine by the descriptors of its job, its answer, and its pid and exit code."""
        with suppress(BrokenPipeError):  # it has ended, which the closed descriptors tell
            socket.send_fds(self._control, [b"\0"], [job, answer, end])

    def end(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


class EngineProcess:
    """A process, forked by a starter, that starts vLLM's processes, and ends when the first of them ends.

    The starter has an environment and a main module of its own, so that a start changes neither `os.environ` nor
    `__main__` of this process. Engines with the same `environment` have the same starter, which ends with the last of
    them; see `keep_starters`. `job` is pickled and read by `worker_main`. The methods `monitor_engine_liveness` and
    `shutdown` are those of vLLM's managers of processes.

    Raises EngineError if the interpreter is shutting down, ConfigurationError if the job cannot be pickled.
    """

    def __init__(self, job: Any, environment: Mapping[str, str], program: str = _PROGRAM) -> None:
        try:
            content = pickle.dumps((_module_path(), job))
        except Exception as error:  # a class of the user's, which may raise anything
            raise ConfigurationError(
                f"the engine's arguments cannot be sent to its process: {describe(error)}"
            ) from error
        self._pid: Future[int | None] = Future()
        self._code: Future[int] = Future()
        self._is_given_up = False
        self._starter: _Starter | None = None
        answer, answer_writing = os.pipe()
        end, end_writing = os.pipe()
        self._answer, ended = os.fdopen(answer, "rb"), os.fdopen(end, encoding="ascii")
        try:
            # First, since nobody would end an engine that a failure after its start left.
            threading.Thread(target=self._follow, args=(ended,), name="engine process", daemon=True).start()
            # A file, since a pipe's reader may be busy with imports.
            with tempfile.TemporaryFile() as file, _lock:
                file.write(content)
                file.seek(0)
                if _starts_refused:
                    raise EngineError("the process is shutting down")
                self._starter = _starter(environment, program)
                self._starter.engines.add(self)
                self._starter.fork(file.fileno(), answer_writing, end_writing)
                _starting.add(self)
        except BaseException:
            self._answer.close()
            self.finish_start(failed=True)
            raise
        finally:
            os.close(answer_writing)
            os.close(end_writing)

    @property
    def pid(self) -> int | None:
        """The pid of this process, whose descendants are vLLM's; None if it never began. Waits for its starter."""
        return self._pid.result()

    def wait_until_started(self) -> Any:
        """Return the answer of `worker_main` once vLLM's processes run; raises StartError."""
        with self._answer:
            try:
                is_started, answer = pickle.load(self._answer)
            except EOFError:
                raise StartError(f"Failed core proc(s): {{'starter': {self.exit_code()}}}") from None
        if not is_started:
            raise StartError(answer["message"], is_refused=answer["is_refused"])
        return answer

    def finish_start(self, *, failed: bool) -> None:
        """Record that the engine has started; if its start failed, kill its processes."""
        if failed:
            self._kill()
        with _lock:
            _starting.discard(self)

    def exit_code(self, timeout: float | None = 2.0) -> int | None:
        """Wait for the process and return its exit code, negative for a signal; None if it runs after the time-out."""
        with suppress(FutureTimeoutError):
            return self._code.result(timeout)
        return None

    def monitor_engine_liveness(self) -> None:
        """Wait until one of vLLM's processes has ended."""
        self.exit_code(None)

    def shutdown(self, timeout: float | None = None) -> None:
        """Terminate vLLM's processes by the engine core, which ends its workers first; kill what remains in time."""
        if self.exit_code(0) is None and (pid := self.pid) is not None:
            tree = process_trees([pid])
            for process in tree:
                if process.pid == pid:
                    process.terminate()
            _, alive = psutil.wait_procs(tree, timeout=timeout or 3.0)
            kill_processes(alive)
            self.exit_code()
        self._leave_starter()

    def _kill(self) -> None:
        with _lock:
            self._is_given_up = True
        if self._pid.done() and not self._code.done():
            kill_processes(process_trees([self._pid.result()]))
            self.exit_code()
        self._leave_starter()

    def _follow(self, end: IO[str]) -> None:
        """Read the process's pid and exit code from the starter; without a code, the starter was killed."""
        with end:
            pid = end.readline()
            with _lock:
                self._pid.set_result(int(pid) if pid else None)
                is_given_up = self._is_given_up
            if is_given_up and pid:
                kill_processes(process_trees([int(pid)]))
            code = end.readline()
        self._code.set_result(int(code) if code else -signal.SIGKILL)
        self._leave_starter()

    def _leave_starter(self) -> None:
        with _lock:
            if self._starter is not None:
                self._starter.engines.discard(self)
            _end_idle_starters()


def _starter(environment: Mapping[str, str], program: str) -> _Starter:
    """Return the starter that runs with this environment, or a new one."""
    own = os.environ if _before_import is None else _before_import
    variables = {**QUIET_VARIABLES, "VLLM_RPC_BASE_PATH": socket_folder(), **own}
    # PARENT may already be set: if this process is itself a worker, to the pid of its parent.
    variables |= {PARENT: str(os.getpid()), **environment}
    read = frozenset(item for item in variables.items() if item[0] not in _UNREAD)
    key = (program, _working_folder(), read)
    starter = _starters.pop(key, None)
    if starter is None or not starter.is_running:
        command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
        command += ["-c", f"import sys; sys.path[:] = {_module_path()!r}; {program}"]
        starter = _Starter(command, variables)
    _starters[key] = starter
    return starter


def _module_path() -> list[str]:
    return [_working_folder() if entry == "" else entry for entry in sys.path]


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def _end_idle_starters() -> None:
    idle = [key for key, starter in _starters.items() if not starter.engines]
    kept = _MAX_IDLE if _keeping and not _starts_refused else 0
    for key in idle[: len(idle) - kept]:
        _starters.pop(key).end()


@contextmanager
def environment_kept() -> Iterator[None]:
    """Take back the variables that vLLM and its libraries set when they are imported; not for two threads at once.

    They would reach the program's own processes, and engines that start later would get another environment.
    """
    global _before_import
    with _lock:
        before = _before_import = dict(os.environ)
    try:
        yield
    finally:
        with _lock:
            _before_import = None
            for name in [name for name in os.environ if name.startswith(_SET_BY_IMPORT)]:
                if name not in before:
                    del os.environ[name]
                else:
                    os.environ[name] = before[name]


@contextmanager
def keep_starters() -> Iterator[None]:
    """Keep starters whose engines have ended: a program that starts engine after engine then imports vLLM once."""
    global _keeping
    with _lock:
        _keeping += 1
    try:
        yield
    finally:
        with _lock:
            _keeping -= 1
            _end_idle_starters()


def refuse_starts() -> None:
    """Refuse to start engines from now on, kill those that are starting, and end starters without engines."""
    global _starts_refused
    with _lock:
        _starts_refused = True
        starting = list(_starting)
    for process in starting:
        process.finish_start(failed=True)
    with _lock:
        _end_idle_starters()


def _forget_parents_starters() -> None:
    global _lock
    _lock = threading.RLock()
    _starters.clear()
    _starting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_starters)
