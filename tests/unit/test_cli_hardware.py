"""`lookahead-agent hardware` shows what was measured and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookahead_agent.cli import hardware as hardware_command
from lookahead_agent.hardware.kernels import KernelTimes
from lookahead_agent.runtime import engine_selection
from lookahead_agent.runtime.engine_selection import EngineSetup
from tests.unit.test_cli import run
from tests.unit.test_hardware_choice import PLAIN, PLAIN_ONE_CORE

TIMES = KernelTimes(seconds={2: PLAIN, 1: PLAIN_ONE_CORE}, processor="a processor", versions={})  # type: ignore[dict-item]


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    anew: list[bool] = []

    def times(_: object, *, again: bool = False) -> KernelTimes:
        anew.append(again)
        return TIMES

    def select_engines(wanted: engine_selection.EngineRequest, *_: object) -> EngineSetup:
        speculation_method = "shared_draft" if wanted.draft_engine else "none"
        return EngineSetup(
            None,
            None,
            speculation_method=speculation_method,
            precision={"target": "fp32"},
            reason=f"{speculation_method}: 48 s",
        )

    monkeypatch.setattr(hardware_command, "kernel_times", times)
    monkeypatch.setattr(hardware_command, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(hardware_command, "fetch", lambda facts, _: Path(facts.hub_id))
    monkeypatch.setattr(hardware_command, "select_engines", select_engines)
    return anew


def test_a_table_and_what_is_chosen(
    measured: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("hardware", "--again", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "fp32" in said
    assert "12857" in said, "microseconds of bf16 with 128 tokens"
    assert "a processor" in said
    assert "none: 48 s" in said
    assert measured == [True]


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hardware", "--steps", "--json", monkeypatch=monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speculation_method"] == "shared_draft"
    assert found["kernels"]["seconds"]["1"]["fp32"]["1"] == pytest.approx(289e-6)
