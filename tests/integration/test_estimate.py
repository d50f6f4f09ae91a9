"""`estimate` on a tiny pair in real vLLM, once as a whole process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.command_line import command, run_here


@pytest.mark.timeout(900)
def test_a_pair_is_planned_from_its_configurations_and_from_itself(
    tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = []
    for folder in tiny_pair:
        copy = tmp_path / folder.name
        copy.mkdir()
        for file in folder.glob("*.json"):
            if "safetensors" not in file.name:
                (copy / file.name).write_bytes(file.read_bytes())
        for file in folder.glob("*.jinja"):
            (copy / file.name).write_bytes(file.read_bytes())
        bare.append(copy)
    costs = tmp_path / "costs.json"
    acceptance = ["--alpha", "0.7", "--token-alpha", "0.8", "--step-tokens", "20"]
    plan = command((bare[0], bare[1]), "estimate", "--dummy-weights", *acceptance, "--costs", str(costs), "--json")
    process = subprocess.run(plan, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stderr
    planned = json.loads(process.stdout)
    assert {setting["mode"] for setting in planned["settings"]} == {
        "off",
        "sd",
        "shared_draft",
        "lr",
        "lr+sd",
        "lr+shared_draft",
    }
    assert planned["costs"]["dummy_weights"] is True
    assert all(seconds > 0 for seconds in planned["costs"]["target"]["seconds"].values())
    assert costs.is_file()
    # What is accepted is measured on the models themselves; what they cost is known.
    here = run_here(command(tiny_pair, "estimate", "--costs", str(costs), "--limit", "2", "--json"), capsys)
    assert here.returncode == 0, here.stderr
    measured = json.loads(here.stdout)
    assert measured["costs"] == planned["costs"]
    assert planned["costs"]["precision"] == {}, "made-up weights are as vLLM has them"
    assert 0 <= measured["acceptance"]["steps"] <= 1
    assert 0 < measured["acceptance"]["tokens"] < 1
    assert measured["acceptance"]["step_tokens"] > 1
