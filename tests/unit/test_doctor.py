"""The checks of `doctor` on complete and incomplete machines, and the reasons of crashed engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lookahead_agent.cli.app import app
from lookahead_agent.engines.processes import crash_reason, start_failure_reason
from lookahead_agent.engines.vllm_config import require_vllm, runs_on_cpu
from lookahead_agent.errors import IsolationError, MissingExtraError
from lookahead_agent.hardware.diagnostics import _SANDBOX_FIX, Check, Machine, diagnose
from lookahead_agent.models.resolve import choose_models
from lookahead_agent.system.inventory import gpus, output_of
from lookahead_agent.system.machine import memory
from tests.unit.weights import weights

PAIR = choose_models("qwen2.5-coder-1.5b")
TARGET, DRAFT = "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    """Return a factory of machines that pass every check, with optional overrides."""

    def build(*, models: bool = True, free: float = 20, total: float = 24, **overrides: Any) -> Machine:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(weights(1000))
        (folder / "config.json").write_text("{}")
        defaults: dict[str, Any] = {
            "locate": lambda _: folder if models else None,
            "memory": lambda: (int(total * 2**30), int(free * 2**30)),
            "gpus": list,
            "runs_on_cpu": lambda: True,
            "has_vllm": lambda: True,
            "version_of": lambda _: "1.0",
            "sandbox": lambda: "landlock",
        }
        return Machine(**(defaults | overrides))

    return build


def check_named(name: str, machine: Machine) -> Check:
    return next(check for check in diagnose(PAIR, machine) if check.name == name)


def test_complete_machine_passes_every_check(machine: Callable[..., Machine]) -> None:
    checks = diagnose(PAIR, machine())
    assert {check.state for check in checks if check.name != "GPU"} == {"ok"}
    assert check_named("Sandbox", machine()).found.endswith("landlock")
    assert CliRunner().invoke(app, ["doctor"], obj=machine()).exit_code == 0


def test_missing_requirements_have_a_command_as_fix(machine: Callable[..., Machine]) -> None:
    without_models = machine(models=False)
    assert check_named(TARGET, without_models).fix == f"lookahead-agent models fetch {TARGET}"
    assert check_named(DRAFT, without_models).state == "missing"
    assert check_named("vLLM", machine(has_vllm=lambda: False)).fix == "pip install 'lookahead-agent[cpu]'"
    with_gpu = machine(gpus=lambda: ["NVIDIA H100, 80 GiB"])
    assert check_named("GPU", with_gpu).found == "NVIDIA H100, 80 GiB"
    assert "[gpu]" in str(check_named("vLLM for GPUs", with_gpu).fix)
    without_pypdf = machine(version_of=lambda name: None if name == "pypdf" else "1.0")
    assert "pypdf not installed" in check_named("[tools]", without_pypdf).found
    assert check_named("[tools]", without_pypdf).fix == "pip install 'lookahead-agent[tools]'"
    assert check_named("[server]", without_pypdf).state == "ok"

    def no_sandbox() -> str:
        raise IsolationError("nothing here can keep a program inside: install bubblewrap")

    assert check_named("Sandbox", machine(sandbox=no_sandbox)).fix == _SANDBOX_FIX


@pytest.mark.parametrize(
    ("torch", "companions", "on_cpu", "fix"),
    [
        ("2.13.0+cpu", {}, True, None),
        ("2.13.0+cpu", {"torchvision": "0.28.0+cpu", "torchaudio": "2.13+cpu", "torchcodec": "0.14.0+cpu"}, True, None),
        ("2.13.0", {"torchvision": "0.28.0"}, True, None),  # a Mac, whose wheels have no suffix
        ("2.13.0+cu130", {"torchvision": "0.28.0"}, False, None),
        ("2.13.0+cpu", {"torchvision": "0.28.0"}, True, "pip uninstall -y torchvision"),
        ("2.13.0+cpu", {"torchaudio": "2.13.0", "torchcodec": "0.14.0+cpu"}, True, "pip uninstall -y torchaudio"),
        ("2.13.0+cpu", {"torchcodec": "0.14.0+cu130"}, True, "pip uninstall -y torchcodec"),
        (
            "2.13.0+cpu", {"torchvision": "0.28.0", "torchaudio": "2.13.0", "torchcodec": "0.14.0"}, True,
            "pip uninstall -y torchvision torchaudio torchcodec",
        ),
        ("2.13.0+cu130", {}, True, "pip install --force-reinstall --no-deps torch==2.13.0 --index-url"),
    ],
)  # fmt: skip
def test_cuda_builds_beside_vllm_for_cpus_have_a_fix(
    torch: str, companions: dict[str, str], on_cpu: bool, fix: str | None, machine: Callable[..., Machine]
) -> None:
    builds = {"torchvision": None, "torchaudio": None, "torchcodec": None, "torch": torch} | companions
    here = machine(version_of=lambda name: builds.get(name, "1.0"), runs_on_cpu=lambda: on_cpu)
    check = check_named("vLLM", here)
    assert check.state == ("ok" if fix is None else "missing")
    assert str(check.fix).startswith(str(fix))
    assert all(version in check.found for version in companions.values()) or fix is None or "+cpu" in str(builds)
    assert CliRunner().invoke(app, ["doctor"], obj=here).exit_code == (0 if fix is None else 1)


@pytest.mark.skipif(not runs_on_cpu(), reason="vLLM for GPUs needs these builds")
def test_no_engine_starts_beside_cuda_builds_and_the_error_has_the_fix() -> None:
    builds = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    with pytest.raises(MissingExtraError, match=r"torchvision 0\.28\.0 need CUDA.*: pip uninstall -y torchvision"):
        require_vllm(builds.get)
    require_vllm(dict.fromkeys(builds, "2.13.0+cpu").get)


def test_occupied_memory_is_optional_and_too_little_memory_is_missing(machine: Callable[..., Machine]) -> None:
    assert check_named("Memory", machine(free=1, total=24)).state == "optional"
    small = check_named("Memory", machine(free=1, total=2))
    assert small.state == "missing"
    assert "1.0 of 2.0 GiB free, up to 5 needed" in small.found


def test_doctor_prints_every_fix_exits_with_1_and_supports_json(machine: Callable[..., Machine]) -> None:
    result = CliRunner().invoke(app, ["doctor"], obj=machine(models=False))
    assert result.exit_code == 1
    assert f"lookahead-agent models fetch {TARGET}" in result.stdout
    assert "[tools]" in result.stdout
    as_json = json.loads(CliRunner().invoke(app, ["doctor", "--json"], obj=machine()).stdout)
    assert {"name", "state", "found", "fix"} == set(as_json[0])


def test_memory_respects_the_cgroup_limit(tmp_path: Path) -> None:
    total, free = memory(tmp_path)
    assert 0 < free <= total
    (tmp_path / "memory.max").write_text("max\n")
    assert memory(tmp_path)[0] == total
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert memory(tmp_path) == (1_000_000, 600_000)
    assert 0 < memory()[1] <= memory()[0]


def test_crash_reasons_name_the_signal_and_its_likely_cause() -> None:
    assert "failed, or was killed" in crash_reason(0)
    assert "failed, or was killed" in crash_reason(None)
    failed = RuntimeError("Engine core initialization failed.\nFailed core proc(s): {'EngineCore': 1}")
    assert start_failure_reason(failed).startswith("Failed core proc(s): {'EngineCore': 1} (VLLM_LOGGING_LEVEL=INFO")
    assert "out of memory" in start_failure_reason(RuntimeError("Failed core proc(s): {'EngineCore': -9}"))
    assert "SIGSEGV" in crash_reason(-11)
    killed = crash_reason(-9)
    assert "run out of memory" in killed
    assert "kv_cache_memory_bytes" in killed


def test_output_of_missing_failing_or_slow_programs_is_none() -> None:
    assert output_of("echo", " here ") == "here"
    assert output_of("no-such-program-anywhere") is None
    assert output_of("false") is None
    assert output_of("sleep", "10", seconds=0.1) is None
    assert isinstance(gpus(), list)
