"""Engine processes: spawned in their own environment, and ended after a failed start or at shutdown."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from lookahead_agent.engines import processes
from lookahead_agent.engines.processes import end_processes, finish_start, kill_processes, refuse_starts, spawning
from lookahead_agent.errors import EngineError

SPAWN = multiprocessing.get_context("spawn")
BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def send_variable(name: str, answers: multiprocessing.SimpleQueue[str | None]) -> None:
    answers.put(os.environ.get(name))


def variable_in_child(name: str) -> str | None:
    """The value of an environment variable in a process that is spawned now."""
    answers: multiprocessing.SimpleQueue[str | None] = SPAWN.SimpleQueue()
    process = SPAWN.Process(target=send_variable, args=(name, answers))
    process.start()
    value = answers.get()
    process.join()
    return value


def test_concurrent_engine_starts_have_separate_environments() -> None:
    lock, restored = threading.Lock(), list[bool]()

    def start(cores: str) -> str | None:
        with ExitStack() as stack:
            stack.enter_context(lock)
            stack.callback(lambda: restored.append(BINDING not in os.environ))
            pids = stack.enter_context(spawning({BINDING: cores}, stack.close))
            value = variable_in_child(BINDING)
            assert len(pids) == 1
            finish_start(pids, failed=False)
            return value

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(start, ["0-2,5", "1"])) == ["0-2,5", "1"]
    assert restored == [True, True]
    assert variable_in_child(BINDING) is None


def test_engine_environment_overrides_that_of_the_program_and_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDING, "7")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    main = sys.modules["__main__"]
    with spawning({BINDING: "1"}):
        assert variable_in_child(BINDING) == "1"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true", "the user's value takes precedence"
        assert sys.modules["__main__"] is not main
    assert os.environ[BINDING] == "7"
    assert "VLLM_NO_USAGE_STATS" not in os.environ
    assert sys.modules["__main__"] is main


def test_process_spawned_by_another_thread_does_not_belong_to_the_engine() -> None:
    with spawning({}) as pids, ThreadPoolExecutor() as threads:
        user_process = threads.submit(spawn_sleeper).result()
        assert pids == []
    end_processes([psutil.Process(user_process.pid)])


def test_socket_folder_is_removed_at_exit_and_avoids_long_paths(tmp_path: Path) -> None:
    script = (
        "import os; from lookahead_agent.engines.processes import spawning\n"
        "with spawning({}): folder = os.environ['VLLM_RPC_BASE_PATH']\n"
        "open(folder + '/socket', 'w').close(); print(folder)"
    )
    short = tempfile.mkdtemp(prefix="short-")
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": short}, capture_output=True)
    folder = Path(done.stdout.decode().strip())
    assert folder.parent == Path(short), done.stderr
    assert not folder.exists()
    Path(short).rmdir()
    long = tmp_path / ("a-folder-whose-name-is-long-" * 3)
    long.mkdir()
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(long)}, capture_output=True)
    assert done.stdout.decode().strip() == str(long), "a socket's address would be too long"


def run_worker(folder: Path, *, fails: bool) -> None:
    atexit.register((folder / "handler").touch)
    # Interpreter teardown would delete this object, which then leaves a file.
    sys.modules["taken_apart"] = TeardownMarker(folder)  # type: ignore[assignment]
    if fails:
        raise ValueError("as expected by the test")


class TeardownMarker:
    """Creates a file when it is deleted."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "taken apart"

    def __del__(self) -> None:
        self._file.touch()


@pytest.mark.parametrize("fails", [False, True])
def test_worker_skips_teardown_after_its_exit_handlers_and_keeps_its_exit_code(tmp_path: Path, fails: bool) -> None:
    with spawning({}):
        process = SPAWN.Process(target=run_worker, args=(tmp_path,), kwargs={"fails": fails})
        process.start()
        process.join()
    assert process.exitcode == fails
    assert [file.name for file in tmp_path.iterdir()] == ["handler"]


@pytest.mark.parametrize(("error", "printed"), [("EOFError", False), ("ValueError", True)])
def test_worker_prints_no_traceback_if_its_parent_ends_early(error: str, printed: bool) -> None:
    main = "import runpy; runpy.run_module('lookahead_agent.engines.worker_main', run_name='__mp_main__')"
    command = [sys.executable, "-c", f"{main}; raise {error}"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert (error in process.stderr) is printed


def test_refuse_starts_kills_starting_engines_and_prevents_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_starts_refused", False)  # restored after the test
    with spawning({}):
        starting = spawn_sleeper()
        refuse_starts()
        assert not psutil.pid_exists(starting.pid or 0)
        with pytest.raises(EngineError, match="shutting down"):
            spawn_sleeper()
    user_process = spawn_sleeper()
    assert user_process.is_alive(), "other processes of the program may start"
    kill_processes([psutil.Process(user_process.pid)])


def test_kill_processes_ends_processes_that_ignore_sigterm_oldest_first() -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.check_call([sys.executable, '-c', {stubborn!r}])"
    command = [sys.executable, "-c", parent]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    children = psutil.Process(process.pid).children()
    kill_processes([*children, psutil.Process(process.pid)])
    assert process.communicate()[1] == "", "the parent was killed before its child"
    assert not any(child.is_running() for child in children)


def spawn_sleeper() -> BaseProcess:
    process = SPAWN.Process(target=time.sleep, args=(60,))
    process.start()
    return process


def test_failed_start_kills_only_its_own_processes() -> None:
    other = spawn_sleeper()
    with spawning({}) as pids:
        failed = spawn_sleeper()
    finish_start(pids, failed=True)
    with spawning({}) as pids:
        started = spawn_sleeper()
    finish_start(pids, failed=False)
    try:
        assert [psutil.pid_exists(process.pid or 0) for process in (failed, started, other)] == [False, True, True]
    finally:
        end_processes(psutil.Process(process.pid) for process in (other, started))
