"""Engines that stay between commands: `up`, `status`, `down`."""

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
from tests.integration.command_line import COMMAND, command, run_here
from tests.integration.conftest import descendants

OWN = ("--token-speculation", "none", "--depth", "4")


Here = Callable[..., subprocess.CompletedProcess[str]]


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
def here(folder: Path, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs a command in this process, in which more than one of them would take as long to start as to run."""

    def run(words: list[str], expected: int = 0) -> subprocess.CompletedProcess[str]:
        done = run_here(words, capsys)
        assert done.returncode == expected, done.stderr
        return done

    return run


def run(words: list[str], expected: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == expected, done.stderr
    return done


def status(here: Here) -> Any:
    return json.loads(here([str(COMMAND), "status", "--json"]).stdout)


def running_now() -> int:
    """Replies that are being written."""
    time.sleep(0.01)
    told = asyncio.run(server_status())
    assert told is not None
    return told.running


@pytest.mark.timeout(900)
def test_commands_use_the_engines_in_the_background(
    tiny_pair: tuple[Path, Path], folder: Path, here: Here, tmp_path: Path
) -> None:
    ask = command(tiny_pair, "ask", "A two and three?", "--policy", "exact", *OWN, "--temperature", "0", "--json")
    ask += ["--max-tokens", "60"]
    run([str(COMMAND), "status"], expected=3)
    up = command(tiny_pair, "up", *OWN)
    said = run(up).stderr
    assert "Running in the background" in said
    told = status(here)
    server = psutil.Process(told["pid"])
    processes = [server, *descendants(server.pid)]
    assert len(processes) >= 5, "two engines, of two processes each"
    assert folder.stat().st_mode & 0o077 == 0

    # A command that tried to load an engine of its own would fail here.
    lean = {"VLLM_TARGET_DEVICE": "none", "PYTHONPATH": _without_vllm(tmp_path)}
    asked = json.loads(run(ask, **lean).stdout)
    off = [part if part != "exact" else "off" for part in ask]
    mine = child_processes()
    assert asked["token_ids"] == json.loads(here(off).stdout)["token_ids"]
    assert child_processes() <= mine, "nor has this process loaded one"
    assert sum(model["committed"] for model in asked["lookahead"]["tokens"].values()) == len(asked["token_ids"])
    assert status(here)["replies"] == 2
    assert "Running already" in here(up).stderr
    other = command((tiny_pair[1], tiny_pair[1]), "up", *OWN)
    assert "lookahead-agent down" in here(other, expected=2).stderr

    # A reply that nobody waits for any more is not written to its end.
    # Asked here: a command takes so long to start that the reply could be done by then.
    asking = subprocess.Popen([*ask[:-1], "900"], stdout=subprocess.PIPE)
    while running_now() == 0:
        assert asking.poll() is None
    asking.send_signal(signal.SIGKILL)
    asking.communicate()
    while running_now():
        assert server.is_running()
    assert status(here)["replies"] == 2

    run([str(COMMAND), "down"])
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    assert sorted(os.listdir(folder)) == ["lock", "log"]


def _without_vllm(folder: Path) -> str:
    """A path for imports on which vLLM cannot be imported."""
    (folder / "vllm.py").write_text("raise ImportError('this process must not load an engine')\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("folder")
def test_a_start_that_fails_or_is_interrupted_leaves_nothing(tiny_pair: tuple[Path, Path], here: Here) -> None:
    wrong = command(tiny_pair, "up", *OWN, "--engine-arg", "no_such_argument=1")
    assert "no_such_argument" in run(wrong, expected=1).stderr
    up = subprocess.Popen(command(tiny_pair, "up", *OWN), stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    assert "Loading" in up.stderr.readline()
    started = descendants(up.pid)
    assert started
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=240)
    assert up.returncode == 130
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    here([str(COMMAND), "status"], expected=3)
