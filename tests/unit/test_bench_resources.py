"""Time, memory and energy of a turn."""

from __future__ import annotations

import subprocess
import sys

import psutil

from lookahead_agent.bench.resources import TurnMeter, environment

BUSY = "x = bytearray(200 << 20)\nfor _ in range(3_000_000): pass\nprint('done', flush=True)\ninput()"


def test_processor_time_and_memory_of_other_processes_count() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with TurnMeter("a", [psutil.Process(process.pid)]) as meter:
            process.stdout.readline()
        process.communicate(b"\n")
    own = psutil.Process().memory_info().rss
    assert meter.record.id == "a"
    assert meter.record.cpu_seconds is not None
    assert meter.record.cpu_seconds > 0
    assert meter.record.peak_memory is not None
    assert meter.record.peak_memory > own


def test_a_process_that_ends_meanwhile_is_no_error() -> None:
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as process,
        TurnMeter("a", [psutil.Process(process.pid)]) as meter,
    ):
        process.communicate(b"\n")
    assert meter.record.seconds > 0


def test_what_results_depend_on_is_named() -> None:
    found = environment()
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert found["packages"]["langchain-core"]
    assert found["lookahead_agent"]
