"""The script that measures on a GPU, with a command that only notes how it was called."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cli.options import PairMeasurement
from tests.unit.conftest import MeasureWith
from tests.unit.test_bench_synthetic import COSTS, ScriptedPair
from tests.unit.test_cli import run

SCRIPT = Path(__file__).parents[2] / "examples" / "measure_gpu.sh"


def measured(folder: Path, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a `lookahead-agent` that writes its arguments down."""
    command = folder / "bin" / "lookahead-agent"
    command.parent.mkdir(exist_ok=True)
    command.write_text(
        f'#!/bin/sh\nfor each in "$@"; do printf "%s\\n" "$each"; done > "{folder}/call.$$"\nexit {status}\n'
    )
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", SCRIPT], cwd=folder, env={"PATH": path, **environment}, capture_output=True, text=True, check=False
    )


def calls(folder: Path) -> list[list[str]]:
    files = sorted(folder.glob("call.*"), key=lambda file: file.stat().st_mtime_ns)
    return [file.read_text().splitlines() for file in files]


def test_everything_is_measured_by_commands_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure_with: MeasureWith
) -> None:
    pair: Any = ScriptedPair(divided=False)
    measure_with(PairMeasurement(lambda *_, **__: pair, lambda *_, **__: COSTS))
    done = measured(tmp_path, DATASET="problems.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "all measured: results/gpu\n"
    made = calls(tmp_path)
    problems = [["bench", "--dataset"], ["bench", "report"]]
    assert [call[:2] for call in made] == [["bench", "synthetic"]] * 4 + problems * 3
    assert len({call[call.index("--out") + 1] for call in made if "--out" in call}) == 7, "a file each"
    monkeypatch.chdir(tmp_path)
    quick = ["--steps", "2", "--step-tokens", "2", "--replies", "1", "--repeats", "1"]
    for call in made[:4]:
        assert run(*call, *quick) == 0, shlex.join(call)


def test_engines_of_all_modes_share_the_gpu_and_modes_can_be_chosen(tmp_path: Path) -> None:
    assert measured(tmp_path, DATASET="problems.jsonl", MODES="off,lr").returncode == 0
    of_problems = [call for call in calls(tmp_path) if "--dataset" in call]
    assert {call[call.index("--modes") + 1] for call in of_problems} == {"off,lr"}
    assert all("gpu_memory_utilization=0.1" in call for call in of_problems)


def test_without_problems_only_shapes_are_measured(tmp_path: Path) -> None:
    assert measured(tmp_path).returncode == 0
    assert len(calls(tmp_path)) == 4


def test_a_piece_ends_in_time_and_a_failure_ends_it(tmp_path: Path) -> None:
    over = measured(tmp_path, PIECE="5")
    assert over.returncode == 75
    assert "run the same again" in over.stdout
    assert not calls(tmp_path)
    assert measured(tmp_path, status=75).returncode == 75
    assert measured(tmp_path, status=3).returncode == 3
    assert len(calls(tmp_path)) == 2, "nothing after it"
