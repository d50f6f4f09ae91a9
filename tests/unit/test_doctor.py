"""What `doctor` finds on machines that lack something."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lookahead_agent.cli.app import app
from lookahead_agent.engines import memory as memory_module
from lookahead_agent.engines.crash_report import CrashReport
from lookahead_agent.engines.memory import kills_for_memory, memory
from lookahead_agent.errors import IsolationError
from lookahead_agent.hardware import checkup as checkup_module
from lookahead_agent.hardware.checkup import Finding, checkup
from lookahead_agent.hardware.gpus import gpus
from lookahead_agent.hardware.output import output_of
from lookahead_agent.models import choose_models
from tests.unit.weights import weights

PAIR = choose_models("qwen2.5-coder-1.5b")
TARGET, DRAFT = "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A machine that has all, but for what is said."""

    def make(
        *, models: bool = True, free: float = 20, total: float = 24, cards: tuple[str, ...] = (), vllm: bool = True
    ) -> None:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(weights(1000))
        (folder / "config.json").write_text("{}")
        monkeypatch.setattr(checkup_module, "locate", lambda _: folder if models else None)
        monkeypatch.setattr(checkup_module, "memory", lambda: (int(total * 2**30), int(free * 2**30)))
        monkeypatch.setattr(checkup_module, "gpus", lambda: list(cards))
        monkeypatch.setattr(checkup_module, "runs_on_cpu", lambda: True)
        monkeypatch.setattr(checkup_module, "find_spec", lambda name: object() if vllm else None)
        monkeypatch.setattr(checkup_module, "version_of", lambda _: "1.0")
        monkeypatch.setattr(checkup_module, "choose", lambda _: "landlock")

    make()
    return make


def found(what: str) -> Finding:
    return next(finding for finding in checkup(PAIR) if finding.what == what)


def test_a_machine_that_has_all(machine: Callable[..., None]) -> None:
    findings = checkup(PAIR)
    assert {finding.state for finding in findings if finding.what != "GPU"} == {"there"}
    assert found("Isolation").found.endswith("landlock")
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


def test_each_thing_that_is_missing_has_a_command(machine: Callable[..., None], monkeypatch: Any) -> None:
    machine(models=False)
    assert found(TARGET).mend == f"lookahead-agent models fetch {TARGET}"
    assert found(DRAFT).state == "missing"
    assert "9 needed" in found("Disk").found
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**9}))
    assert (found("Disk").state, found("Disk").mend[:30]) == ("missing", "export LOOKAHEAD_AGENT_CACHE=/")  # type: ignore[index]
    machine(vllm=False)
    assert found("vLLM").mend == "pip install 'lookahead-agent[cpu]'"
    machine(cards=("NVIDIA H100, 80 GiB",))
    assert found("GPU").found == "NVIDIA H100, 80 GiB"
    assert "[gpu]" in str(found("vLLM for GPUs").mend)
    monkeypatch.setattr(checkup_module, "version_of", lambda name: None if name == "lxml" else "1.0")
    assert "lxml not installed" in found("[tools]").found
    assert found("[tools]").mend == "pip install 'lookahead-agent[tools]'"
    assert found("[server]").state == "there"

    def none(_: str) -> str:
        raise IsolationError("nothing here can keep a program inside: install bubblewrap")

    monkeypatch.setattr(checkup_module, "choose", none)
    assert found("Isolation").mend == "apt-get install bubblewrap"


def test_memory_that_is_taken_and_memory_that_is_not_there(machine: Callable[..., None]) -> None:
    machine(free=1, total=24)
    assert found("Memory").state == "optional"
    machine(free=1, total=2)
    assert found("Memory").state == "missing"
    assert "1.0 of 2.0 GiB free, up to 5 needed" in found("Memory").found


def test_the_command_says_it_all(machine: Callable[..., None]) -> None:
    machine(models=False)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert f"lookahead-agent models fetch {TARGET}" in done.stdout
    assert "[tools]" in done.stdout
    as_json = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert {"what", "state", "found", "mend"} == set(as_json[0])


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    total, free = memory()
    assert 0 < free <= total
    monkeypatch.setattr(memory_module, "_GROUP", tmp_path)
    assert memory()[0] == total
    (tmp_path / "memory.max").write_text("max\n")
    assert memory()[0] == total
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert memory() == (1_000_000, 600_000)


class Ended:
    """A process that has ended."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode

    def join(self, patience: float) -> None:
        """Nothing to wait for."""


def test_a_process_that_the_system_killed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    monkeypatch.setattr(memory_module, "_COUNTERS", (tmp_path / "nothing", events))
    assert kills_for_memory() == 0
    events.write_text("low 0\noom 3\noom_kill 3\n")
    assert kills_for_memory() == 3
    crash_report = CrashReport()
    assert "failed, or was killed" in crash_report.explain([Ended(0), Ended(None)])  # type: ignore[list-item]
    assert crash_report.explain_start("Failed core proc(s): {'EngineCore': 1}") is None
    assert "out of memory" in str(crash_report.explain_start("Failed core proc(s): {'EngineCore': -9}"))
    assert "SIGSEGV" in crash_report.explain([Ended(-11), Ended(None)])  # type: ignore[list-item]
    killed = crash_report.explain([Ended(-9)])  # type: ignore[list-item]
    assert "run out of memory" in killed
    assert "kv_cache_memory_bytes" in killed
    events.write_text("oom_kill 4\n")
    assert "has killed a process for lack of memory" in crash_report.explain([Ended(1)])  # type: ignore[list-item]
    assert "out of memory" in str(crash_report.explain_start("anything"))


def test_programs_that_are_not_there_fail_or_take_too_long() -> None:
    assert output_of("echo", " here ") == "here"
    assert output_of("no-such-program-anywhere") is None
    assert output_of("false") is None
    assert output_of("sleep", "10", seconds=0.1) is None
    assert isinstance(gpus(), list)
