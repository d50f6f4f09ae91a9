"""Comparing precisions by worked solutions, on scripted engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.precision import compare_precisions, read_solutions
from lookahead_agent.cli import options
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.progress import LogProgress
from lookahead_agent.runtime.engine_set import EngineSet
from tests.unit.test_cli import run


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    file = tmp_path / "problems.jsonl"
    rows: list[dict[str, Any]] = [
        {"id": f"p{number}", "question": "How many?", "solution": "So it is" + " four" * number}
        for number in range(1, 6)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"question": "No solution."}]))
    return file


class Models:
    """Makes models of which those with fewer bits find " four" less likely."""

    def __init__(self) -> None:
        self.made: list[Precision] = []

    def __call__(self, precision: Precision) -> ChatLookahead:
        self.made.append(precision)
        logprobs = {" four": -2.0 if precision == "fp32" else -2.5}
        engine = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("x")], logprobs=logprobs)
        return ChatLookahead(engines=EngineSet(engine), policy="off")


def test_each_is_held_against_the_first(problems: Path, tmp_path: Path) -> None:
    solutions, models, out = read_solutions(problems), Models(), tmp_path / "r.jsonl"
    assert [solution.id for solution in solutions] == ["p1", "p2", "p3", "p4", "p5"]
    fp32, int8 = compare_precisions(solutions, ["fp32", "int8-weights"], out, LogProgress(), models)
    assert (fp32.solutions, fp32.against) == (5, None)
    assert fp32.perplexity < int8.perplexity
    assert int8.against is not None
    assert int8.against.excludes(0)
    # p1 is "So it is four": of its tokens one is half a nat less likely.
    rows = {(row["precision"], row["problem"]): row for row in map(json.loads, out.read_text().splitlines())}
    assert rows["fp32", "p1"]["logprob"] - rows["int8-weights", "p1"]["logprob"] == pytest.approx(0.5)
    again = compare_precisions(solutions, ["fp32", "int8-weights"], out, LogProgress(), models)
    assert again == [fp32, int8]
    assert models.made == ["fp32", "int8-weights"], "what is there already is not read again"


def test_an_interrupted_comparison_is_completed(problems: Path, tmp_path: Path) -> None:
    out, models = tmp_path / "r.jsonl", Models()
    whole = compare_precisions(read_solutions(problems), ["fp32"], tmp_path / "whole.jsonl", LogProgress(), models)
    compare_precisions(read_solutions(problems, 2), ["fp32"], out, LogProgress(), models)
    assert compare_precisions(read_solutions(problems), ["fp32"], out, LogProgress(), models) == whole
    assert len(out.read_text().splitlines()) == 5


def test_files_without_solutions(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"question": "?"}\n')
    with pytest.raises(ConfigurationError, match="no problem"):
        read_solutions(file)
    file.write_text("nonsense\n")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_solutions(file)


def test_the_command(problems: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    models = Models()
    monkeypatch.setattr(options, "ChatLookahead", lambda **fields: models(fields["precision"]))
    monkeypatch.chdir(problems.parent)
    command = ("bench", "precision", "--dataset", str(problems))
    assert run(*command, monkeypatch=monkeypatch) == 0
    assert "int8-weights" in capsys.readouterr().out
    assert run(*command, "--json", monkeypatch=monkeypatch) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert run(*command, "--precisions", "int3", monkeypatch=monkeypatch) == 2
