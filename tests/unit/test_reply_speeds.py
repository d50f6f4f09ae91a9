"""Reply speeds are stored per configuration, and the CPU share of other processes is measured separately."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lookahead_agent.engines.processes import available_cores
from lookahead_agent.hardware.reply_speeds import CPUTime, ReplySpeeds
from tests.waiting import wait_until


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    return tmp_path


def test_speeds_are_stored_per_configuration(cache: Path) -> None:
    speeds = ReplySpeeds(["target", "draft"])
    assert speeds.paces() == {}
    speeds.add("shared_draft", 0.1)
    speeds.add("shared_draft", 0.1)
    assert speeds.paces() == {}, "two samples are too few"
    for _ in range(3):
        speeds.add("shared_draft", 9.0)  # another process used the cores
    assert speeds.acceptance_rate() is None
    for _ in range(3):
        speeds.add("none", 0.2, acceptance_rate=0.9)
    assert ReplySpeeds(["target", "draft"]).paces() == {"shared_draft": 0.1, "none": 0.2}
    assert ReplySpeeds(["target", "draft"]).acceptance_rate() == 0.9
    assert ReplySpeeds(["target", "other"]).paces() == {}
    (file,) = cache.glob("hardware/speeds-*.json")
    for _ in range(100):
        speeds.add("shared_draft", 0.3)
    assert speeds.paces()["shared_draft"] == 0.3
    assert len(file.read_text()) < 1000
    file.write_text("[]")
    assert speeds.paces() == {}


def test_the_share_of_other_processes_is_relative_to_all_available_cores() -> None:
    cores = len(available_cores())
    began = CPUTime(total=10.0, own=4.0, at=100.0)
    assert CPUTime(10.0 + 4 * cores, 4.0 + 2.5 * cores, 105.0).share_of_others(began) == pytest.approx(0.3)
    assert CPUTime(14.0, 8.5, 105.0).share_of_others(began) == 0.0, "clock skew is no load of other processes"
    assert began.share_of_others(began) == 0.0


def test_cpu_time_of_a_child_process_counts_as_own() -> None:
    began = CPUTime.now()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = psutil.Process(child.pid)
        before = process.cpu_times().user
        asyncio.run(wait_until(lambda: process.cpu_times().user - before >= 0.2, 60))
        now = CPUTime.now()
    finally:
        child.kill()
        child.wait()
    assert now.own - began.own >= 0.2
    assert now.total >= began.total
