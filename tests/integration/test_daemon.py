"""Engines that stay between commands: `up`, `status`, `down`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lookahead_agent.generation.server_backend import RUNTIME_DIR_VARIABLE, server_status
from tests.integration.command_line import COMMAND, command
from tests.integration.conftest import descendants

OWN = ("--token-speculation", "none", "--depth", "4")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="lookahead-") as folder:
        environment = {**os.environ, RUNTIME_DIR_VARIABLE: folder}
        try:
            yield environment
        finally:
            subprocess.run([COMMAND, "down"], env=environment, check=True, timeout=120, capture_output=True)


def run(words: list[str], environment: dict[str, str], expected: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == expected, done.stderr
    return done


def status(environment: dict[str, str]) -> Any:
    return json.loads(run([str(COMMAND), "status", "--json"], environment).stdout)


def running_now() -> int:
    """Replies that are being written."""
    time.sleep(0.01)
    told = asyncio.run(server_status())
    assert told is not None
    return told.running


@pytest.mark.timeout(900)
def test_commands_use_the_engines_in_the_background(
    tiny_pair: tuple[Path, Path], environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = command(tiny_pair, "ask", "A two and three?", "--policy", "exact", *OWN, "--temperature", "0", "--json")
    ask += ["--max-tokens", "60"]
    run([str(COMMAND), "status"], environment, expected=3)
    up = command(tiny_pair, "up", *OWN)
    said = run(up, environment).stderr
    assert "Running in the background" in said
    told = status(environment)
    server = psutil.Process(told["pid"])
    processes = [server, *descendants(server.pid)]
    assert len(processes) >= 5, "two engines, of two processes each"
    assert Path(environment[RUNTIME_DIR_VARIABLE]).stat().st_mode & 0o077 == 0

    # A command that tried to load an engine of its own would fail here.
    lean = {**environment, "VLLM_TARGET_DEVICE": "none", "PYTHONPATH": _without_vllm(tmp_path)}
    asked = json.loads(run(ask, lean).stdout)
    off = [part if part != "exact" else "off" for part in ask]
    assert asked["token_ids"] == json.loads(run(off, lean).stdout)["token_ids"]
    assert sum(model["committed"] for model in asked["lookahead"]["tokens"].values()) == len(asked["token_ids"])
    assert status(environment)["replies"] == 2
    assert "Running already" in run(up, environment).stderr
    other = command((tiny_pair[1], tiny_pair[1]), "up", *OWN)
    assert "lookahead-agent down" in run(other, environment, expected=2).stderr

    # A reply that nobody waits for any more is not written to its end.
    # Asked here: a command takes so long to start that the reply could be done by then.
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, environment[RUNTIME_DIR_VARIABLE])
    asking = subprocess.Popen([*ask[:-1], "900"], env=environment, stdout=subprocess.PIPE)
    while running_now() == 0:
        assert asking.poll() is None
    asking.send_signal(signal.SIGKILL)
    asking.communicate()
    while running_now():
        assert server.is_running()
    assert status(environment)["replies"] == 2

    run([str(COMMAND), "down"], environment)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    assert sorted(os.listdir(environment[RUNTIME_DIR_VARIABLE])) == ["lock", "log"]


def _without_vllm(folder: Path) -> str:
    """A path for imports on which vLLM cannot be imported."""
    (folder / "vllm.py").write_text("raise ImportError('this process must not load an engine')\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.timeout(300)
def test_a_start_that_fails_or_is_interrupted_leaves_nothing(
    tiny_pair: tuple[Path, Path], environment: dict[str, str]
) -> None:
    wrong = command(tiny_pair, "up", *OWN, "--engine-arg", "no_such_argument=1")
    assert "no_such_argument" in run(wrong, environment, expected=1).stderr
    up = subprocess.Popen(command(tiny_pair, "up", *OWN), env=environment, stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    assert "Loading" in up.stderr.readline()
    started = descendants(up.pid)
    assert started
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=240)
    assert up.returncode == 130
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    run([str(COMMAND), "status"], environment, expected=3)
