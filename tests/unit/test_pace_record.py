"""Measured replies are kept on disk by what they belong to, and the CPU share of other processes is measured."""

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

from lookahead_agent.modes.record import WINDOW, CPUTime, PaceRecord, Series
from lookahead_agent.system.machine import available_cores
from tests.waiting import wait_until


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    return tmp_path


ALONE = Series("none", "off")
RATE = ALONE._replace(quantity="acceptance")


def add(record: PaceRecord, series: Series, value: float) -> None:
    record.update(lambda measurements: measurements.update({series: [*measurements.get(series, []), value][-WINDOW:]}))


def test_measurements_are_kept_by_configuration_mode_load_node_and_quantity(cache: Path) -> None:
    record = PaceRecord(["target", "draft"])
    assert record.read() == {}
    series = [
        ALONE,
        ALONE._replace(configuration="draft_model"),
        ALONE._replace(mode="sd"),
        ALONE._replace(load="beside others"),
        ALONE._replace(node='a "planner" | of: ä'),
        ALONE._replace(quantity="prefill"),
        RATE,
    ]
    for number, each in enumerate(series):
        add(record, each, number / 16 or 0.5)
    assert PaceRecord(["target", "draft"]).read() == {each: [n / 16 or 0.5] for n, each in enumerate(series)}
    assert PaceRecord(["target", "other"]).read() == {}
    (file,) = cache.glob("hardware/paces-*.json")
    for _ in range(100):
        add(record, ALONE, 1 / 3)
    assert record.read()[ALONE] == [0.3333] * WINDOW
    assert len(file.read_text()) < 1000


def test_no_name_of_a_node_makes_a_file_that_cannot_be_read(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = PaceRecord(["target"])
    names = [f"{number:03}" + "n" * 200 for number in range(768)]
    record.update(lambda kept: kept.update({ALONE._replace(node=name): [1.234e-5] * WINDOW for name in names}))
    assert len(record.read()) == 768
    for name in ("\u00e4" * 200, "n" * 1000, "\udc80", "a\nb"):
        add(record, ALONE._replace(node=name), 1.0)
    assert len(record.read()) == 768
    assert warnings_of(caplog) == []


DAMAGED = {
    "empty": b"",
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
    **{
        name: b'[["none", "off", "alone", "", "writing", %s]]' % values
        for name, values in {
            "huge integer": b"[%s, 1, 1]" % (b"9" * 400),
            "integer of too many digits": b"[%s]" % (b"9" * 5000),
            "no number": b"[NaN, NaN, NaN]",
            "infinite": b"[Infinity, 1, 1]",
            "negative": b"[-1, -1, -1]",
            "zero": b"[0, 0, 0]",
            "text": b'["1", "x"]',
            "truth": b"[true, true, true]",
            "number for a list": b"3",
            "no values": b"[]",
            "too many values": b"[%s1]" % (b"1, " * WINDOW),
        }.items()
    },
    "list": b"[1]",
    "null": b"null",
    "another version": b'{"none": [0.1]}',
    "short row": b'[["none", "off", [0.1]]]',
    "unknown mode": b'[["none", "fast", "alone", "", "writing", [0.1]]]',
    "rate above one": b'[["none", "off", "alone", "", "acceptance", [7.0]]]',
    "rate of one": b'[["none", "off", "alone", "", "acceptance", [1.0]]]',
    "binary": bytes(range(256)) * 10,
    "another encoding": "[]".encode("utf-16"),
    "too long": b" " * (1 << 21) + b"[]",
}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_warning_and_a_new_file(
    cache: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    add(PaceRecord(["target"]), ALONE, 1.0)
    (file,) = cache.glob("hardware/paces-*.json")
    file.write_bytes(content)
    for _ in range(2):  # each chat model reads the file
        assert PaceRecord(["target"]).read() == {}
    record = PaceRecord(["target"])
    for series, value in ((ALONE, 0.5), (RATE, 0.25), (ALONE, 0.5)):
        add(record, series, value)
    assert record.read() == {RATE: [0.25], ALONE: [0.5, 0.5]}
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("kind", ["folder", "pipe", "lock that is held", "lock that is a folder", "impossible value"])
def test_a_reply_waits_for_no_file(cache: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    record = PaceRecord(["target"])
    add(record, ALONE, 1.0)
    (file,) = cache.glob("hardware/paces-*.json")
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
            add(record, ALONE, 1.0)
    else:
        add(record, ALONE, float("nan") if kind == "impossible value" else 1.0)
    assert record.read() == ({} if kind == "folder" else {ALONE: [1.0]})
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
