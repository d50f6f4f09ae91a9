"""`lookahead-agent hardware` shows the processor and the configuration of a pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookahead_agent.hardware.inventory import processor
from tests.unit.test_cli import run
from tests.unit.test_engine_selection import LARGE, SMALL, model


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path / "cache"))
    target, draft = model(tmp_path / "target", LARGE), model(tmp_path / "draft", SMALL)
    return ["--model", str(target), "--draft", str(draft)]


def test_the_processor_and_the_choice(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hardware", *pair) == 0
    said = capsys.readouterr().out
    assert processor() in said
    assert "the first choice for this processor and pair" in said


def test_as_json(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hardware", *pair, "--steps", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speculation_method"] == "shared_draft"
    assert found["precision"]["target"] in ("int8", "int8-weights")
