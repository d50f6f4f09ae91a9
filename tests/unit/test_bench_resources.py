"""Time, memory and energy of a turn."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest

from lookahead_agent.bench.environment import environment
from lookahead_agent.bench.resources import TurnMeter, energy_counter, gpu_load

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
    assert meter.record.gpu_seconds is None
    assert meter.record.joules is None


def test_a_process_that_ends_meanwhile_is_no_error() -> None:
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as process,
        TurnMeter("a", [psutil.Process(process.pid)]) as meter,
    ):
        process.communicate(b"\n")
    assert meter.record.seconds > 0


def test_energy_and_gpu_time_where_the_machine_tells() -> None:
    joules = iter([100.0, 142.0])
    with TurnMeter("a", [], lambda: next(joules), lambda: [0.5, 1.0]) as meter:
        pass
    assert meter.record.joules == 42
    assert meter.record.gpu_seconds is not None
    assert 0 <= meter.record.gpu_seconds <= 1.6 * meter.record.seconds + 0.1


def test_energy_of_processors(tmp_path: Path) -> None:
    for name, used in (("intel-rapl:0", "2000000"), ("intel-rapl:1", "3000000"), ("intel-rapl:0:0", "1000000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(used)
    counter = energy_counter(tmp_path)
    assert counter is not None
    assert counter() == 5, "packages; their parts are in them"
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("no number")
    assert counter() is None, "a part of the energy is no measure"
    assert energy_counter(tmp_path / "nothing") is None


def test_energy_and_load_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
    nvml.nvmlInit = lambda: None  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetCount = lambda: 2  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda card: 1000 * (card + 1)  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetUtilizationRates = lambda card: types.SimpleNamespace(gpu=50 * card)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counter, load = energy_counter(tmp_path), gpu_load()
    assert counter is not None
    assert load is not None
    assert counter() == 3
    assert load() == [0.0, 0.5]


def test_what_results_depend_on_is_named() -> None:
    found = environment()
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert found["packages"]["langchain-core"]
    assert found["lookahead_agent"]
