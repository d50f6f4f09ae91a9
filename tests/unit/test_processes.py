"""Engine processes: spawned in their own environment, and ended after a failed start or at shutdown."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lookahead_agent.engines import child_watch, starter
from lookahead_agent.engines.processes import PARENT, kill_processes, process_trees
from lookahead_agent.engines.starter import EngineProcess, StartError, environment_kept, keep_starters, refuse_starts
from lookahead_agent.errors import ConfigurationError, EngineError

SPAWN = multiprocessing.get_context("spawn")
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
# Starters of these tests import no vLLM, and call `launch` for each job.
SERVE = "from lookahead_agent.engines.worker_main import serve_starts; serve_starts(launch)"
STARTER = "import os, subprocess, sys, time; launch = lambda job: {}; " + SERVE
SLEEP = STARTER.format("time.sleep(60)")
CHILD = "[subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid]"
ANSWER = STARTER.format(f"({CHILD}, (job, dict(os.environ), sys.path))")


def as_job(value: object, **variables: str) -> dict[str, Any]:
    """A job of `worker_main` for a starter of these tests."""
    return {"job": value, "variables": variables, "worker_cores": []}


class Job:
    """A class of this module, which is the main module of some programs."""


def test_a_start_changes_neither_the_environment_nor_the_main_module_of_the_program() -> None:
    before, main = dict(os.environ), sys.modules["__main__"]
    user = {"TOKENIZERS_PARALLELISM": "true"}
    started = [EngineProcess(as_job(cores, **{BINDING: cores}), user, ANSWER) for cores in ("0-2,5", "1")]
    try:
        assert pickle.loads(pickle.dumps(Job())).__class__ is Job
        assert dict(os.environ) == before
        assert sys.modules["__main__"] is main
        for process, cores in zip(started, ("0-2,5", "1"), strict=True):
            job, variables, path = process.wait_until_started()
            assert job == cores
            starters = psutil.Process(process.pid).ppid()
            expected = {BINDING: cores, PARENT: str(process.pid), "VLLM_NO_USAGE_STATS": "1", **user}
            assert {name: variables[name] for name in expected} == expected
            assert Path(variables["VLLM_RPC_BASE_PATH"]).is_dir()
            assert path == [os.getcwd() if entry == "" else entry for entry in sys.path]
            assert process.exit_code(0) is None
        assert psutil.Process(started[0].pid).ppid() == starters, "both are forked from one process"
    finally:
        for process in started:
            process.finish_start(failed=True)
    assert [process.exit_code() for process in started] == [-9, -9]
    wait_for(lambda: not psutil.pid_exists(starters))
    assert dict(os.environ) == before


def test_starters_end_with_their_last_engine_unless_they_are_kept() -> None:
    def starter_of(environment: dict[str, str]) -> int:
        process = EngineProcess(as_job(None), environment, ANSWER)
        process.wait_until_started()
        pid = psutil.Process(process.pid).ppid()
        process.finish_start(failed=True)
        return pid

    first = starter_of({})
    assert not psutil.pid_exists(first)
    with keep_starters():
        kept = starter_of({})
        assert kept != first
        assert starter_of({}) == kept
        others = [starter_of({"OTHER": number}) for number in "123"]
        assert len({kept, *others}) == 4, "an engine has the environment that it needs"
        assert [psutil.pid_exists(pid) for pid in (kept, *others)] == [False, False, True, True]
        psutil.Process(others[-1]).kill()
        os.waitid(os.P_PID, others[-1], os.WEXITED | os.WNOWAIT)
        replaced = starter_of({"OTHER": "3"})
        assert replaced != others[-1], "a starter that was killed is replaced"
    assert not any(psutil.pid_exists(pid) for pid in (*others, replaced))


def test_an_engine_whose_starter_is_killed_has_ended() -> None:
    process = EngineProcess(as_job(None), {}, ANSWER)
    process.wait_until_started()
    tree = process_trees([process.pid])
    psutil.Process(psutil.Process(process.pid).ppid()).kill()
    assert process.exit_code(30) == -9
    gone, alive = psutil.wait_procs([each for each in tree if each.pid == process.pid], 30)
    assert gone
    assert not alive
    kill_processes(tree)


@pytest.mark.parametrize("error", [OSError(109, "too many references"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_sent", [True, False])
def test_a_start_that_fails_at_its_starter_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, is_sent: bool
) -> None:
    fork, starting = starter._Starter.fork, set(starter._starting)
    used: list[starter._Starter] = []

    def fail(each: starter._Starter, *descriptors: int) -> None:
        used.append(each)
        if is_sent:
            fork(each, *descriptors)
        raise error

    monkeypatch.setattr(starter._Starter, "fork", fail)
    with pytest.raises(type(error)):
        EngineProcess(as_job(None), {}, SLEEP)
    wait_for(lambda: not used[0].is_running)
    assert not used[0].engines
    assert used[0] not in starter._starters.values()
    assert starter._starting <= starting


def test_variables_that_an_import_sets_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    before = dict(os.environ)
    with environment_kept():
        os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "VLLM_PLUGINS": "other"}
        process = EngineProcess(as_job(None), {}, ANSWER)
        monkeypatch.setenv("SET_BY_THE_PROGRAM", "meanwhile")
        _, variables, _ = process.wait_until_started()
        process.finish_start(failed=True)
    assert variables["VLLM_PLUGINS"] == "mine"
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in variables
    assert dict(os.environ) == {**before, "SET_BY_THE_PROGRAM": "meanwhile"}


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (STARTER.format("os.kill(os.getpid(), 9)"), "-9"),
        ("raise SystemExit(3)", "-9"),
        (STARTER.format("os._exit(3)"), "3"),
        (
            "from lookahead_agent.errors import ConfigurationError\ndef launch(job): raise ConfigurationError(job)\n"
            + SERVE,
            "no such argument",
        ),
    ],
)
def test_a_failed_start_says_why(program: str, message: str) -> None:
    process = EngineProcess(as_job("no such argument"), {}, program)
    with pytest.raises(StartError, match=message) as raised:
        process.wait_until_started()
    assert raised.value.is_refused == (message == "no such argument")
    process.finish_start(failed=True)
    with pytest.raises(ConfigurationError, match="cannot be sent to its process"):
        EngineProcess(lambda: None, {})


UNGUARDED = """
import os, pickle, sys
print("the script runs", flush=True)
from lookahead_agent.engines.starter import EngineProcess
program = '''
import importlib.util, multiprocessing, sys, time
sys.modules['__main__'].__spec__ = importlib.util.find_spec('lookahead_agent.engines.worker_main')
from lookahead_agent.engines.worker_main import serve_starts

def launch(job):
    worker = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(0,))
    worker.start()
    worker.join()
    return [], worker.exitcode

serve_starts(launch)
'''
process = EngineProcess({"job": None, "variables": {}, "worker_cores": []}, {}, program)
print(process.wait_until_started(), flush=True)
"""


@pytest.mark.parametrize("from_stdin", [False, True])
def test_a_script_without_a_guard_runs_once(tmp_path: Path, from_stdin: bool) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, "-" if from_stdin else str(tmp_path / "script.py")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, input=UNGUARDED if from_stdin else "", env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split("\n") == ["the script runs", "0", ""], done.stderr


@pytest.mark.parametrize(("end", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 11)", -11)])
def test_the_waiting_program_ends_as_the_first_process_does_and_forwards_sigterm(end: str, code: int) -> None:
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(flush=True); "
    starter = (
        "import os, subprocess, sys\n"
        f"children = [subprocess.Popen([sys.executable, '-c', {child!r} + end], stdout=subprocess.PIPE) "
        f"for end in ('time.sleep(60)', sys.argv[1])]\n"
        "for child in children: child.stdout.readline()\n"
        f"os.execv(sys.executable, [sys.executable, '-I', '-S', {child_watch.__file__!r}, str(os.getppid()), "
        "*(str(child.pid) for child in children)])"
    )
    process = subprocess.Popen([sys.executable, "-c", starter, end])
    assert process.wait(30) == code
    process = subprocess.Popen([sys.executable, "-c", starter, "time.sleep(60)"])
    wait_for(lambda: any("child_watch" in word for word in psutil.Process(process.pid).cmdline()))
    children = psutil.Process(process.pid).children()
    wait_for(lambda: "SigCgt:" in Path(f"/proc/{process.pid}/status").read_text() and caught(process.pid, 15))
    process.terminate()
    assert process.wait(30) == 7, "the children end by their own handlers"
    psutil.wait_procs(children, 30)


def caught(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_socket_folder_is_removed_at_exit_and_avoids_long_paths(tmp_path: Path) -> None:
    script = (
        "from lookahead_agent.engines.processes import socket_folder\n"
        "folder = socket_folder(); open(folder + '/socket', 'w').close(); print(folder)"
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


def spawn_worker(folder: str, fails: bool) -> None:
    """Run `run_worker` in a spawned process, and exit with its code."""
    process = SPAWN.Process(target=run_worker, args=(Path(folder),), kwargs={"fails": fails})
    process.start()
    process.join()
    raise SystemExit(process.exitcode)


class TeardownMarker:
    """Creates a file when it is deleted."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "taken apart"

    def __del__(self) -> None:
        self._file.touch()


@pytest.mark.parametrize("fails", [False, True])
def test_worker_skips_teardown_after_its_exit_handlers_and_keeps_its_exit_code(tmp_path: Path, fails: bool) -> None:
    main = "import sys, importlib.util as u; main = u.find_spec('lookahead_agent.engines.worker_main')"
    main += "; sys.modules['__main__'].__spec__ = main"
    script = f"{main}; from tests.unit.test_processes import spawn_worker; spawn_worker({str(tmp_path)!r}, {fails})"
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == fails
    assert [file.name for file in tmp_path.iterdir()] == ["handler"]


@pytest.mark.parametrize(("error", "printed"), [("EOFError", False), ("ValueError", True)])
def test_worker_prints_no_traceback_if_its_parent_ends_early(error: str, printed: bool) -> None:
    main = "import runpy; runpy.run_module('lookahead_agent.engines.worker_main', run_name='__mp_main__')"
    command = [sys.executable, "-c", f"{main}; raise {error}"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert (error in process.stderr) is printed


def test_refuse_starts_kills_starting_engines_and_prevents_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "_starts_refused", False)  # restored after the test
    starting, early = (EngineProcess(as_job(None), {"OTHER": number}, SLEEP) for number in "12")
    assert starting.pid is not None
    pids = starting.pid, psutil.Process(starting.pid).ppid()
    refuse_starts()  # one engine may not have been forked yet
    assert not any(map(psutil.pid_exists, pids))
    assert early.exit_code(30) == -9
    with pytest.raises(EngineError, match="shutting down"):
        EngineProcess(as_job(None), {}, SLEEP)


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


def test_failed_start_kills_only_its_own_processes_and_a_manager_ends_them() -> None:
    failed, started = (EngineProcess(as_job(None), {}, SLEEP) for _ in range(2))
    pids = failed.pid, started.pid
    assert None not in pids
    failed.finish_start(failed=True)
    started.finish_start(failed=False)
    assert not psutil.pid_exists(pids[0] or 0)
    assert started.exit_code(0) is None
    watcher = threading.Thread(target=started.monitor_engine_liveness)
    watcher.start()
    started.shutdown()
    started.shutdown()
    watcher.join(30)
    assert not watcher.is_alive()
    assert not psutil.pid_exists(pids[1] or 0)
