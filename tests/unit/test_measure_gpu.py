"""The script that measures on a GPU, with commands that only note how they were called."""

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


def measured(folder: Path, *parts: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the script with commands that write their arguments and vLLM's settings down."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name in ("lookahead-agent", "nvidia-cuda-mps-control"):
        command = commands / name
        command.write_text(
            f'#!/bin/sh\nfor each in {name} "$@"; do printf "%s\\n" "$each"; done > "{folder}/call.$$"\n'
            f'printf "%s\\n" "${{VLLM_USE_V2_MODEL_RUNNER-}}" > "{folder}/runner.$$"\nexit {status}\n'
        )
        command.chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", SCRIPT, *parts], cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=False
    )


def calls(folder: Path) -> list[list[str]]:
    files = sorted(folder.glob("call.*"), key=lambda file: file.stat().st_mtime_ns)
    return [file.read_text().splitlines() for file in files]


def test_every_part_is_a_command_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure_with: MeasureWith
) -> None:
    pair: Any = ScriptedPair(divided=False)
    measure_with(PairMeasurement(lambda *_, **__: pair, lambda *_, **__: COSTS))
    done = measured(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"== {part}" for part in PARTS]
    made = [call[1:] for call in calls(tmp_path) if call[0] == "lookahead-agent"]
    assert [call[:2] for call in made] == [["bench", "synthetic"]] * len(PARTS)
    assert [call[call.index("--out") + 1] for call in made] == [f"results/gpu/{part}.jsonl" for part in PARTS]
    monkeypatch.chdir(tmp_path)
    quick = ["--steps", "2", "--step-tokens", "2", "--replies", "1", "--repeats", "1"]
    for call in made:
        assert run(*call, *quick) == 0, shlex.join(call)
    assert {path.stem for path in (tmp_path / "results" / "gpu").glob("*.md")} == set(PARTS)


def test_some_parts_can_be_chosen(tmp_path: Path) -> None:
    assert measured(tmp_path, "mps", "runner").returncode == 0
    assert [call[0] for call in calls(tmp_path)] == [
        "nvidia-cuda-mps-control",
        "lookahead-agent",
        "nvidia-cuda-mps-control",
        "lookahead-agent",
    ], "the service runs for one part"
    runners = sorted(tmp_path.glob("runner.*"), key=lambda file: file.stat().st_mtime_ns)
    assert [file.read_text().strip() for file in runners] == ["", "", "", "1"]
    wrong = measured(tmp_path, "fast")
    assert wrong.returncode == 2
    assert "choose from start 8b mps" in wrong.stderr


def test_a_part_that_fails_lets_the_others_run(tmp_path: Path) -> None:
    assert measured(tmp_path, "8b", "32b", status=3).returncode == 3
    assert len(calls(tmp_path)) == 2
