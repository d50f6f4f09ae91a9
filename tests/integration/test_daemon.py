"""The daemon keeps engines between commands: `up`, `status`, `down`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lookahead_agent.cli.app import run_command
from lookahead_agent.engines.processes import child_processes
from lookahead_agent.generation.server_backend import RUNTIME_DIR_VARIABLE, server_status
from tests.integration.command_line import COMMAND, command, run_in_process
from tests.integration.conftest import descendants

OPTIONS = ("--token-speculation", "none", "--depth", "4")


RunCommand = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime directory, also of the commands that run in this process."""
    with tempfile.TemporaryDirectory(prefix="lookahead-") as folder:
        monkeypatch.setenv(RUNTIME_DIR_VARIABLE, folder)
        try:
            yield Path(folder)
        finally:
            assert run_command(["down"]) == 0


@pytest.fixture
def in_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs a command in this process, because a subprocess takes as long to start as the command to run."""

    def run(argv: list[str], expected: int = 0) -> subprocess.CompletedProcess[str]:
        result = run_in_process(argv, capsys)
        assert result.returncode == expected, result.stderr
        return result

    return run


def run(argv: list[str], expected: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == expected, result.stderr
    return result


def status(in_process: RunCommand) -> Any:
    return json.loads(in_process([str(COMMAND), "status", "--json"]).stdout)


def running_replies() -> int:
    """Number of replies that the daemon generates."""
    time.sleep(0.01)
    current = asyncio.run(server_status())
    assert current is not None
    return current.running


@pytest.mark.timeout(1200)
def test_commands_use_the_daemons_engines_until_down(
    tiny_pair: tuple[Path, Path], folder: Path, in_process: RunCommand, tmp_path: Path
) -> None:
    ask = command(tiny_pair, "ask", "A two and three?", "--policy", "exact", *OPTIONS, "--temperature", "0", "--json")
    ask += ["--max-tokens", "60"]
    run([str(COMMAND), "status"], expected=3)
    up = command(tiny_pair, "up", *OPTIONS)
    messages = run(up).stderr
    assert "Running in the background" in messages
    daemon = status(in_process)
    server = psutil.Process(daemon["pid"])
    processes = [server, *descendants(server.pid)]
    assert len(processes) >= 5, "two engines, a process that watches each, and the server"
    assert folder.stat().st_mode & 0o077 == 0

    # A command that loads an engine of its own fails here.
    without_vllm = {"VLLM_TARGET_DEVICE": "none", "PYTHONPATH": _without_vllm(tmp_path)}
    reply = json.loads(run(ask, **without_vllm).stdout)
    off = [part if part != "exact" else "off" for part in ask]
    children_before = child_processes()
    assert reply["token_ids"] == json.loads(in_process(off).stdout)["token_ids"]
    assert child_processes() <= children_before, "this process loaded no engine"
    assert sum(model["committed"] for model in reply["lookahead"]["tokens"].values()) == len(reply["token_ids"])
    assert status(in_process)["replies"] == 2
    assert "Running already" in in_process(up).stderr
    other = command((tiny_pair[1], tiny_pair[1]), "up", *OPTIONS)
    assert "lookahead-agent down" in in_process(other, expected=2).stderr

    # The daemon aborts the reply of a killed client.
    # Its status is read in this process: a command starts so slowly that the reply could end first.
    client = subprocess.Popen([*ask[:-1], "900"], stdout=subprocess.PIPE)
    while running_replies() == 0:
        assert client.poll() is None
    client.send_signal(signal.SIGKILL)
    client.communicate()
    while running_replies():
        assert server.is_running()
    assert status(in_process)["replies"] == 2

    run([str(COMMAND), "down"])
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert sorted(os.listdir(folder)) == ["lock", "log"]


def _without_vllm(folder: Path) -> str:
    """An import path on which importing vLLM fails."""
    (folder / "vllm.py").write_text("raise ImportError('this process must not load an engine')\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("folder")
def test_failed_or_interrupted_start_leaves_no_process(tiny_pair: tuple[Path, Path], in_process: RunCommand) -> None:
    wrong = command(tiny_pair, "up", *OPTIONS, "--engine-arg", "no_such_argument=1")
    assert "no_such_argument" in run(wrong, expected=1).stderr
    up = subprocess.Popen(command(tiny_pair, "up", *OPTIONS), stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    assert "Loading" in up.stderr.readline()
    started = descendants(up.pid)
    assert started
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=600)
    assert up.returncode == 130
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    in_process([str(COMMAND), "status"], expected=3)
