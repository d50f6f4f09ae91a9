"""`lookahead-agent machine` shows what was measured and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookahead_agent.cli import machine as machine_command
from lookahead_agent.machine.kernels import KernelTimes
from lookahead_agent.runtime import arranging
from lookahead_agent.runtime.arranging import Arranged
from tests.unit.test_cli import run
from tests.unit.test_machine_choice import PLAIN, PLAIN_ONE_CORE

TIMES = KernelTimes(seconds={2: PLAIN, 1: PLAIN_ONE_CORE}, processor="a processor", versions={})  # type: ignore[dict-item]


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    anew: list[bool] = []

    def times(_: object, *, again: bool = False) -> KernelTimes:
        anew.append(again)
        return TIMES

    def arrange(wanted: arranging.Wanted, *_: object) -> Arranged:
        guessing = "guided" if wanted.draft_engine else "none"
        return Arranged(None, None, guessing=guessing, precision={"target": "fp32"}, reason=f"{guessing}: 48 s")

    monkeypatch.setattr(machine_command, "kernel_times", times)
    monkeypatch.setattr(machine_command, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(machine_command, "fetch", lambda facts, _: Path(facts.hub_id))
    monkeypatch.setattr(machine_command, "arrange", arrange)
    return anew


def test_a_table_and_what_is_chosen(
    measured: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("machine", "--again", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "fp32" in said
    assert "12857" in said, "microseconds of bf16 with 128 tokens"
    assert "a processor" in said
    assert "none: 48 s" in said
    assert measured == [True]


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("machine", "--steps", "--json", monkeypatch=monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["guessing"] == "guided"
    assert found["kernels"]["seconds"]["1"]["fp32"]["1"] == pytest.approx(289e-6)
