"""Reply speeds are stored per configuration, and the CPU share of other processes is measured separately."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from lookahead_agent.modes.record import CPUTime, ReplySpeeds
from lookahead_agent.system.machine import available_cores
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


DAMAGED = {
    "empty": b"",
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
    "huge integer": b'{"none": [%s, 1, 1]}' % (b"9" * 400),
    "integer of too many digits": b'{"none": [%s]}' % (b"9" * 5000),
    "no number": b'{"none": [NaN, NaN, NaN]}',
    "infinite": b'{"none": [Infinity, 1, 1]}',
    "negative": b'{"none": [-1, -1, -1]}',
    "zero": b'{"none": [0, 0, 0]}',
    "text": b'{"none": ["1", "x"]}',
    "truth": b'{"none": [true, true, true]}',
    "number for a list": b'{"none": 3}',
    "list": b"[1]",
    "null": b"null",
    "rate above one": b'{"acceptance rate": [7.0]}',
    "rate of one": b'{"acceptance rate": [1.0]}',
    "binary": bytes(range(256)) * 10,
    "another encoding": "{}".encode("utf-16"),
    "too long": b" " * (1 << 19) + b"{}",
}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_warning_and_a_new_file(
    cache: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    ReplySpeeds(["target"]).add("none", 1.0)
    (file,) = cache.glob("hardware/speeds-*.json")
    file.write_bytes(content)
    for _ in range(2):  # each chat model reads the file
        speeds = ReplySpeeds(["target"])
        assert (speeds.paces(), speeds.acceptance_rate()) == ({}, None)
    for _ in range(3):
        speeds.add("none", 0.5, 0.25)
    assert (speeds.paces(), speeds.acceptance_rate()) == ({"none": 0.5}, 0.25)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("kind", ["folder", "pipe", "lock that is held", "lock that is a folder", "impossible value"])
def test_a_reply_waits_for_no_file(cache: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    speeds = ReplySpeeds(["target"])
    speeds.add("none", 1.0)
    (file,) = cache.glob("hardware/speeds-*.json")
    lock = file.with_suffix(".lock")
    assert lock.stat().st_mode & 0o077 == 0
    if kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif kind == "lock that is a folder":
        lock.unlink()
        lock.mkdir()
    if kind == "lock that is held":
        with FileLock(lock):
            speeds.add("none", 1.0)
    else:
        speeds.add("none", float("nan") if kind == "impossible value" else 1.0)
    assert speeds.paces() == {}
    assert file.is_dir() if kind == "folder" else file.is_file()
    assert len(warnings_of(caplog)) == (kind in ("folder", "pipe"))


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
