"""`estimate` on a tiny pair in real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.command_line import command, run_in_process


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("tiny")  # the second run shares its engines
def test_estimate_measures_costs_on_dummy_weights_and_acceptance_on_the_models(
    tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = []  # copies without weights
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
    argv = command((bare[0], bare[1]), "estimate", "--dummy-weights", *acceptance, "--costs", str(costs), "--json")
    first = run_in_process(argv, capsys)
    assert first.returncode == 0, first.stderr
    estimated = json.loads(first.stdout)
    assert {setting["mode"] for setting in estimated["settings"]} == {
        "off",
        "sd",
        "shared_draft",
        "lr",
        "lr+sd",
        "lr+shared_draft",
    }
    assert estimated["costs"]["dummy_weights"] is True
    assert all(seconds > 0 for seconds in estimated["costs"]["target"]["seconds"].values())
    assert costs.is_file()
    # This run measures acceptance on the models themselves, and reads their costs from the file.
    second = run_in_process(command(tiny_pair, "estimate", "--costs", str(costs), "--limit", "2", "--json"), capsys)
    assert second.returncode == 0, second.stderr
    measured = json.loads(second.stdout)
    assert measured["costs"] == estimated["costs"]
    assert estimated["costs"]["precision"] == {}, "dummy weights have vLLM's default precision"
    assert 0 <= measured["acceptance"]["steps"] <= 1
    assert 0 < measured["acceptance"]["tokens"] < 1
    assert measured["acceptance"]["step_tokens"] > 1
