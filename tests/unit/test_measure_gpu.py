"""The script that measures on a GPU, with stub commands that record their arguments."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cost_model.pair import PairMeasurement
from tests.unit.conftest import MeasureWith
from tests.unit.test_bench_synthetic import COSTS, ScriptedPair
from tests.unit.test_cli import run

SCRIPT = Path(__file__).parents[2] / "examples" / "measure_gpu.sh"
PARTS = ["start", "8b", "mps", "many", "32b", "runner"]


def run_script(folder: Path, *parts: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the script with stub commands that record their arguments and the setting of vLLM's model runner."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name in ("lookahead-agent", "nvidia-cuda-mps-control"):
        command = commands / name
        command.write_text(
            f'#!/bin/sh\n{{ printf "%s\\t" {name} "$@"; echo "${{VLLM_USE_V2_MODEL_RUNNER-}}"; }} >> "{folder}/calls"\n'
            f"exit {status}\n"
        )
        command.chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", SCRIPT, *parts], cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=False
    )


def recorded_calls(folder: Path) -> list[list[str]]:
    """The name and the arguments of each command, and last the setting of vLLM's model runner."""
    return [line.split("\t") for line in (folder / "calls").read_text().splitlines()]


def test_every_part_is_a_bench_command_that_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure_with: MeasureWith
) -> None:
    pair: Any = ScriptedPair(divided=False)
    measure_with(PairMeasurement(lambda *_, **__: pair, lambda *_, **__: COSTS))
    completed = run_script(tmp_path)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.splitlines() == [f"== {part}" for part in PARTS]
    benches = [call[1:-1] for call in recorded_calls(tmp_path) if call[0] == "lookahead-agent"]
    assert [call[:2] for call in benches] == [["bench", "synthetic"]] * len(PARTS)
    assert [call[call.index("--out") + 1] for call in benches] == [f"results/gpu/{part}.jsonl" for part in PARTS]
    monkeypatch.chdir(tmp_path)
    quick = ["--steps", "2", "--step-tokens", "2", "--replies", "1", "--repeats", "1"]
    for call in benches:
        assert run(*call, *quick) == 0, shlex.join(call)
    assert {path.stem for path in (tmp_path / "results" / "gpu").glob("*.md")} == set(PARTS)


def test_only_the_named_parts_run_and_unknown_parts_are_rejected(tmp_path: Path) -> None:
    assert run_script(tmp_path, "mps", "runner").returncode == 0
    assert [call[0] for call in recorded_calls(tmp_path)] == [
        "nvidia-cuda-mps-control",
        "lookahead-agent",
        "nvidia-cuda-mps-control",
        "lookahead-agent",
    ], "the MPS service runs only for its part"
    assert [call[-1] for call in recorded_calls(tmp_path)] == ["", "", "", "1"]
    invalid = run_script(tmp_path, "fast")
    assert invalid.returncode == 2
    assert "choose from start 8b mps" in invalid.stderr


def test_failing_part_sets_the_exit_status_and_the_others_still_run(tmp_path: Path) -> None:
    assert run_script(tmp_path, "8b", "32b", status=3).returncode == 3
    assert len(recorded_calls(tmp_path)) == 2
