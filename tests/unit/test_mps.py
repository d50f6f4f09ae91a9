"""An MPS server of the library's own, with a program in place of NVIDIA's that keeps a process and answers commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lookahead_agent.engines import ScriptedEngine
from lookahead_agent.engines.processes import end_processes
from lookahead_agent.engines.vllm_config import VLLMConfig, process_environment, runs_on_cpu
from lookahead_agent.errors import EngineStartError
from lookahead_agent.hardware.mps import MultiProcessService
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_selection import RuntimeSpec
from lookahead_agent.runtime.runtime import Runtime
from lookahead_agent.system import background
from tests.unit.test_runtime import DRAFT_NAME, HUB, MODELS, TARGET_NAME, Pool, engines_of, gpu_loaders

PROGRAM = """#!/bin/sh
# Knows -d, quit and get_server_list, as nvidia-cuda-mps-control does. Its server is a process that sleeps.
server="${CUDA_MPS_PIPE_DIRECTORY:-HERE/default}/server"
runs() { [ -f "$server" ] && kill -0 "$(cat "$server")" 2>/dev/null; }
if [ "${1-}" = -d ]; then
    [ ! -f HERE/broken ] || exit 1
    [ -d "$CUDA_MPS_LOG_DIRECTORY" ] && [ -z "${CUDA_VISIBLE_DEVICES-}" ] || exit 1
    sleep 600 >/dev/null 2>&1 </dev/null &
    echo $! > "$server"
    echo "$server" >> HERE/started
    exit 0
fi
read -r command || exit 1
runs || exit 1
[ "$command" != quit ] || kill "$(cat "$server")"
"""


class Program:
    """The path of the program, and the servers that it has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = str(folder / "mps-control")
        Path(self.path).write_text(PROGRAM.replace("HERE", str(folder)))
        Path(self.path).chmod(0o755)

    @property
    def servers(self) -> list[Path]:
        """Their files, each with a pid while the server runs and its folder is there."""
        started = self.folder / "started"
        return [Path(line) for line in started.read_text().splitlines()] if started.exists() else []

    def run_outside(self) -> subprocess.Popen[bytes]:
        """A server that every program finds; the caller ends it."""
        (self.folder / "default").mkdir()
        process = subprocess.Popen(["sleep", "600"])
        (self.folder / "default" / "server").write_text(str(process.pid))
        return process


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return Program(tmp_path)


@pytest.fixture(autouse=True)
def _hub(tmp_path: Path) -> None:
    HUB.append(tmp_path / "hub")


def pid_of(server: Path) -> int:
    return int(server.read_text())


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_server_has_folders_of_its_own_and_ends_with_its_last_user(program: Program) -> None:
    service = MultiProcessService(program.path)
    first, second = service.acquire(), service.acquire()
    assert first == second
    assert first.folder is not None
    (server,) = program.servers
    assert server.parent == Path(first.folder)
    pid = pid_of(server)
    service.release()
    assert psutil.pid_exists(pid)
    service.release()
    wait_for(lambda: not psutil.pid_exists(pid))
    assert not server.parent.parent.exists()
    assert service.acquire().folder not in (None, first.folder), "a later engine has a new server"
    service.release()


def test_server_that_has_ended_is_replaced(program: Program) -> None:
    service = MultiProcessService(program.path)
    first = service.acquire()
    os.kill(pid_of(program.servers[0]), signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(pid_of(program.servers[0])))
    second = service.acquire()
    assert second.folder not in (None, first.folder)
    service.release()


def test_server_ends_when_this_process_ends_all_its_children(program: Program) -> None:
    service = MultiProcessService(program.path)
    service.acquire()
    (server,) = program.servers
    pid = pid_of(server)
    shells = [each for each in psutil.Process().children() if str(server.parent.parent) in each.cmdline()]
    end_processes(shells)
    assert len(shells) == 1
    wait_for(lambda: not psutil.pid_exists(pid))
    service.release()


def test_running_server_is_used(program: Program) -> None:
    outside = program.run_outside()
    try:
        use = MultiProcessService(program.path).acquire()
        assert (use.folder, program.servers) == (None, [])
        assert "under the running MPS server" in use.explanation
    finally:
        outside.kill()
        outside.wait()


def test_without_the_program_or_a_server_engines_take_turns(program: Program) -> None:
    assert "is not installed" in MultiProcessService("no-such-program").acquire().explanation
    (program.folder / "broken").touch()
    use = MultiProcessService(program.path).acquire()
    assert use.folder is None
    assert use.explanation == "The engines of a GPU take turns, since no MPS server starts"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_server_ends_when_its_process_is_killed(program: Program, number: signal.Signals) -> None:
    code = (
        "import os, sys, time; from lookahead_agent.hardware.mps import MultiProcessService; "
        "service = MultiProcessService(sys.argv[1]); service.acquire(); "
        # A forked child that outlives the process does not keep its server alive.
        "os.fork() or time.sleep(60); print('started', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, program.path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = None
    try:
        assert process.stdout.readline() == b"started\n"
        (child,) = [each for each in psutil.Process(process.pid).children() if "python" in each.name()]
        (server,) = program.servers
        pid = pid_of(server)
        assert psutil.pid_exists(pid)
        process.send_signal(number)
        process.wait()
        wait_for(lambda: not psutil.pid_exists(pid) and not server.parent.parent.exists())
        assert child.is_running()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if child is not None:
            child.kill()


def start(service: MultiProcessService, pool: Pool, policy: str = "exact:depth=4", **more: Any) -> tuple[Runtime, str]:
    gpus = more.pop("gpus", 1)
    spec = RuntimeSpec(MODELS, **more)
    forced = as_policy(policy).forces_speculation
    runtime = Runtime(spec, expects_draft=forced, loaders=gpu_loaders(pool, gpus=gpus, mps=service))
    engines = background.run(engines_of(runtime, policy))
    assert engines.engine_setup is not None
    return runtime, engines.engine_setup.reason


def test_engines_on_one_gpu_start_under_the_server_and_end_before_it(program: Program) -> None:
    class WatchingPool(Pool):
        def release(self, config: VLLMConfig) -> None:
            super().release(config)
            assert psutil.pid_exists(pid_of(program.servers[-1])), "engines end first"

    pool = WatchingPool()
    runtime, reason = start(MultiProcessService(program.path), pool)
    (server,) = program.servers
    configs = {config.model.name: config for config in pool.started}
    assert {config.mps for config in configs.values()} == {str(server.parent)}
    assert configs[TARGET_NAME].beside_draft, "it leaves the draft its share of the multiprocessors"
    assert not configs[DRAFT_NAME].beside_draft
    if not runs_on_cpu():
        variables = process_environment(configs[TARGET_NAME], [])
        assert variables["CUDA_MPS_PIPE_DIRECTORY"] == str(server.parent)
        assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "80"
    assert "run at the same time, under an MPS server that ends with them" in reason
    pid = pid_of(server)
    runtime.close()
    wait_for(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize(
    ("more", "explained"),
    [({"mps": False}, "take turns"), ({"gpus": 2}, "GPU 1 of its own"), ({"policy": "off"}, "")],
)
def test_no_server_starts_where_it_is_off_or_no_gpu_is_shared(
    program: Program, more: dict[str, Any], explained: str
) -> None:
    pool = Pool()
    runtime, reason = start(MultiProcessService(program.path), pool, **more)
    assert {config.mps for config in pool.started} == {None}
    assert program.servers == []
    assert explained in reason
    runtime.close()


def test_engines_that_do_not_start_under_the_server_start_without(program: Program) -> None:
    class RejectingPool(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            if config.mps is not None:
                raise EngineStartError("MPS client failed to connect")
            return super().acquire(config)

    pool = RejectingPool()
    runtime, reason = start(MultiProcessService(program.path), pool)
    assert len(pool.held) == 2
    assert "without an MPS server, because they did not start so: MPS client failed to connect" in reason
    assert len(program.servers) == 1
    wait_for(lambda: not program.servers[0].exists())
    runtime.close()
