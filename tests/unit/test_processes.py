"""Engines that start at the same time: each on its cores, and nothing left of one that fails."""

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


def tell(name: str, answers: multiprocessing.SimpleQueue[str | None]) -> None:
    answers.put(os.environ.get(name))


def told(name: str) -> str | None:
    """A variable in the environment of a process that is spawned now."""
    answers: multiprocessing.SimpleQueue[str | None] = SPAWN.SimpleQueue()
    process = SPAWN.Process(target=tell, args=(name, answers))
    process.start()
    found = answers.get()
    process.join()
    return found


def test_each_of_two_engines_that_start_together_has_an_environment_of_its_own() -> None:
    configuring = threading.Lock()

    def start(cores: str) -> str | None:
        with ExitStack() as stack:
            stack.enter_context(configuring)
            numbers = stack.enter_context(spawning({BINDING: cores}, stack.close))
            found = told(BINDING)
            assert len(numbers) == 1
            assert BINDING not in os.environ or configuring.locked(), "another one may be next"
            finish_start(numbers, failed=False)
            return found

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(start, ["0-2,5", "1"])) == ["0-2,5", "1"]
    assert BINDING not in os.environ
    assert told(BINDING) is None


def test_the_environment_of_an_engine_goes_before_the_programs_which_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDING, "7")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    main = sys.modules["__main__"]
    with spawning({BINDING: "1"}):
        assert told(BINDING) == "1"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true", "what the user wants goes first"
        assert sys.modules["__main__"] is not main
    assert os.environ[BINDING] == "7"
    assert "VLLM_NO_USAGE_STATS" not in os.environ
    assert sys.modules["__main__"] is main


def test_a_process_of_the_users_own_threads_is_none_of_the_engine() -> None:
    with spawning({}) as numbers, ThreadPoolExecutor() as threads:
        users = threads.submit(sleeper).result()
        assert numbers == []
    end_processes([psutil.Process(users.pid)])


def test_sockets_are_in_a_folder_that_is_removed_at_the_end(tmp_path: Path) -> None:
    script = (
        "import os; from lookahead_agent.engines.processes import spawning\n"
        "with spawning({}): folder = os.environ['VLLM_RPC_BASE_PATH']\n"
        "open(folder + '/socket', 'w').close(); print(folder)"
    )
    short = tempfile.mkdtemp(prefix="short-")
    said = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": short}, capture_output=True)
    folder = Path(said.stdout.decode().strip())
    assert folder.parent == Path(short), said.stderr
    assert not folder.exists()
    Path(short).rmdir()
    long = tmp_path / ("a-folder-whose-name-is-long-" * 3)
    long.mkdir()
    said = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(long)}, capture_output=True)
    assert said.stdout.decode().strip() == str(long), "a socket's address would be too long"


def work(folder: Path, *, fails: bool) -> None:
    atexit.register((folder / "handler").touch)
    # What Python takes apart as it ends says so, unless it has no time to.
    sys.modules["taken_apart"] = Goodbye(folder)  # type: ignore[assignment]
    if fails:
        raise ValueError("as expected by the test")


class Goodbye:
    """Leaves a file when it is taken apart."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "taken apart"

    def __del__(self) -> None:
        self._file.touch()


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_leaves_after_its_exit_handlers_with_its_exit_code(tmp_path: Path, fails: bool) -> None:
    with spawning({}):
        process = SPAWN.Process(target=work, args=(tmp_path,), kwargs={"fails": fails})
        process.start()
        process.join()
    assert process.exitcode == fails
    assert [file.name for file in tmp_path.iterdir()] == ["handler"]


@pytest.mark.parametrize(("error", "told"), [("EOFError", False), ("ValueError", True)])
def test_a_worker_whose_parent_ended_before_it_had_sent_anything_says_nothing(error: str, told: bool) -> None:
    main = "import runpy; runpy.run_module('lookahead_agent.engines.worker_main', run_name='__mp_main__')"
    command = [sys.executable, "-c", f"{main}; raise {error}"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert (error in process.stderr) is told


def test_nothing_is_spawned_once_starts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_starts_refused", False)  # to be put back
    with spawning({}):
        starting = sleeper()
        refuse_starts()
        assert not psutil.pid_exists(starting.pid or 0)
        with pytest.raises(EngineError, match="shutting down"):
            sleeper()
    users = sleeper()
    assert users.is_alive(), "what is spawned otherwise is not ours to refuse"
    kill_processes([psutil.Process(users.pid)])


def test_killing_takes_no_answer_and_begins_with_the_oldest() -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.check_call([sys.executable, '-c', {stubborn!r}])"
    command = [sys.executable, "-c", parent]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    children = psutil.Process(process.pid).children()
    kill_processes([*children, psutil.Process(process.pid)])
    assert process.communicate()[1] == "", "it was not there to see the end of its child"
    assert not any(child.is_running() for child in children)


def sleeper() -> BaseProcess:
    process = SPAWN.Process(target=time.sleep, args=(60,))
    process.start()
    return process


def test_a_start_that_fails_leaves_nothing_and_others_stay() -> None:
    before = sleeper()
    with spawning({}) as numbers:
        bad = sleeper()
    finish_start(numbers, failed=True)
    with spawning({}) as numbers:
        good = sleeper()
    finish_start(numbers, failed=False)
    try:
        assert [psutil.pid_exists(process.pid or 0) for process in (bad, good, before)] == [False, True, True]
    finally:
        end_processes(psutil.Process(process.pid) for process in (before, good))
