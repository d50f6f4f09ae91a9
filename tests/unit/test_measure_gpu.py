"""The script that measures on a GPU, with stub commands that record their arguments."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.unit.test_cli import run
from tests.unit.test_recordings import record
from tests.unit.test_replay import folder_chat, recordings_file, shape

Completed = subprocess.CompletedProcess[str]
SCRIPT = Path(__file__).parents[2] / "examples" / "measure_gpu.sh"
PARTS = ["8b", "32b", "8b-at-once", "8b-draft-model"]


def run_script(folder: Path, *parts: str, status: int = 0, mps: bool = True, **variables: str) -> Completed:
    """Run the script with stub commands that record their arguments."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name in ("lookahead-agent", *(["nvidia-cuda-mps-control"] if mps else [])):
        command = commands / name
        command.write_text(
            f'#!/bin/sh\n{{ printf "%s\\t" {name} "$@"; echo "${{CUDA_MPS_PIPE_DIRECTORY-}}"; }} >> "{folder}/calls"\n'
            f"exit {status if name == 'lookahead-agent' else 0}\n"
        )
        command.chmod(0o755)
    environment = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["sh", SCRIPT, *parts], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def recorded_calls(folder: Path) -> list[list[str]]:
    """The name and the arguments of each command, and last the folder of MPS."""
    return [line.split("\t") for line in (folder / "calls").read_text().splitlines()]


def option(call: list[str], name: str) -> str:
    return call[call.index(name) + 1]


@pytest.mark.parametrize(("mps", "sharing"), [(True, "-mps"), (False, "")])
def test_every_part_is_a_bench_command_that_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mps: bool, sharing: str
) -> None:
    completed = run_script(tmp_path, mps=mps)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert [line.partition(", ")[0] for line in completed.stdout.splitlines()] == [f"== {p}{sharing}" for p in PARTS]
    benches = [call[1:-1] for call in recorded_calls(tmp_path) if call[0] == "lookahead-agent"]
    assert [call[:2] for call in benches] == [["bench", "replay"]] * len(PARTS)
    assert [option(call, "--out") for call in benches] == [f"results/gpu/{part}{sharing}.jsonl" for part in PARTS]
    seconds = [int(option(call, "--seconds")) for call in benches]
    assert seconds[0] <= 560 - 20 - 3 * 70 <= seconds[-1] <= 540, "each part leaves time for the later ones"
    monkeypatch.chdir(tmp_path)
    file = recordings_file(tmp_path, record())
    for size in ("8b", "0.6b", "32b", "1.7b"):
        shape(tmp_path / "shapes" / f"qwen3-{size}")
    for call in benches:
        call[2] = str(file)
        assert run(*call, chat_class=folder_chat) == 0, shlex.join(call)
    assert {path.stem for path in (tmp_path / "results" / "gpu").glob("*.jsonl")} == {f"{p}{sharing}" for p in PARTS}


def test_mps_runs_around_the_parts_with_private_folders(tmp_path: Path) -> None:
    assert run_script(tmp_path, "32b", status=3).returncode == 3
    calls = recorded_calls(tmp_path)
    mps = "nvidia-cuda-mps-control"
    assert [call[:2] for call in calls] == [[mps, "-d"], ["lookahead-agent", "bench"], [mps, calls[0][-1]]]
    (folder,) = {call[-1] for call in calls}
    assert Path(folder).is_absolute()
    assert not Path(folder).exists()


def test_failing_part_sets_the_exit_status_and_the_others_still_run(tmp_path: Path) -> None:
    assert run_script(tmp_path, status=3, mps=False).returncode == 3
    assert len(recorded_calls(tmp_path)) == len(PARTS)


def test_only_the_named_parts_run_and_unknown_parts_are_rejected(tmp_path: Path) -> None:
    assert run_script(tmp_path, "8b", mps=False).returncode == 0
    (call,) = recorded_calls(tmp_path)
    assert option(call, "--target-shape") == "shapes/qwen3-8b"
    assert int(option(call, "--seconds")) >= 530, "no later part needs time"
    invalid = run_script(tmp_path, "fast", mps=False)
    assert invalid.returncode == 2
    assert "choose from 8b 32b 8b-at-once 8b-draft-model" in invalid.stderr


def test_part_without_time_is_left_out(tmp_path: Path) -> None:
    completed = run_script(tmp_path, mps=False, TOTAL="60")
    assert completed.returncode == 75
    assert "== 8b: no time is left" in completed.stderr
    (call,) = recorded_calls(tmp_path)
    assert option(call, "--target-shape") == "shapes/qwen3-8b"
