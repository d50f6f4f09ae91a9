"""Every command in the README and the docs runs as written, on a scripted model."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import uvicorn
from typer.testing import CliRunner

from lookahead_agent.cli.app import app
from lookahead_agent.cost_model.estimator import Acceptance
from lookahead_agent.cost_model.pair import PairMeasurement
from lookahead_agent.hardware.diagnostics import Machine
from lookahead_agent.system.jsonl import read_content
from lookahead_agent.testing import scripted_chat
from tests.unit.conftest import MeasureWith
from tests.unit.test_calibrate import pair_rows
from tests.unit.test_cli import run
from tests.unit.test_cost_model import SMALL
from tests.unit.test_examples import reply_to
from tests.unit.test_recordings import record
from tests.unit.test_replay import folder_chat, recordings_file, shape

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def lines(program: str) -> list[str]:
    """Commands of a program in indented blocks, with continued lines joined."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        found += re.findall(rf"^    ({program} .*)$", text, re.MULTILINE)
    return list(dict.fromkeys(found))


@pytest.fixture(autouse=True)
def _scripted_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measure_with: MeasureWith) -> None:
    measure_with(PairMeasurement(lambda *_, **__: object(), lambda *_, **__: SMALL, lambda *_: Acceptance(0.6, 0.8)))
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_: None)
    monkeypatch.setattr("lookahead_agent.cli.serve.start_daemon", lambda *_: 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LOOKAHEAD_AGENT_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    problem = '{"id": "a", "question": "How many?", "answer": "36", "solution": "It is 36."}\n'
    (tmp_path / "problems.jsonl").write_text(problem)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        shop.execute("CREATE TABLE pens (colour TEXT)")
    (tmp_path / "servers.json").write_text('{"mcpServers": {}}')
    for folder in ("handbook", "folder"):
        (tmp_path / folder).mkdir()
    (tmp_path / "handbook" / "travel.md").write_text("A day abroad has a meal allowance.\n")
    (tmp_path / "my_module.py").write_text('def my_tool(text: str) -> str:\n    """Say it again."""\n    return text\n')


# `bench peers` and `--against` need servers, which test_bench_peers and test_server_parity start.
ELSEWHERE = re.compile(r" bench peers | --against ")


@pytest.mark.parametrize("line", [line for line in lines("lookahead-agent") if ELSEWHERE.search(line) is None])
def test_command_runs(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, *arguments = shlex.split(line, comments=True)
    if arguments[:2] == ["bench", "report"]:
        Path("results").mkdir()
        Path("docs").symlink_to(ROOT / "docs")
        Path("results/agents.jsonl").write_bytes(
            read_content(ROOT / "docs" / "measurements" / "templates-own-6.jsonl.xz")
        )
    if arguments[0] == "calibrate" and arguments[1] == "fit":
        Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pair_rows()))
        monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", "cache")  # certificates are stored there
    if arguments[0] == "doctor":  # as if the models were downloaded
        assert CliRunner().invoke(app, arguments, obj=Machine(locate=lambda _: ROOT)).exit_code == 0
        return
    if arguments[0] == "serve":
        arguments += ["--port", "0"]  # the documented port may be in use
    scripted = partial(scripted_chat, reply_to)
    if arguments[:2] == ["bench", "replay"]:
        recordings_file(Path(), record())
        for option in ("--target-shape", "--draft-shape"):
            shape(Path(arguments[arguments.index(option) + 1]))
        scripted = folder_chat
    if arguments[0] == "bench" and arguments[1].startswith("--") and "--dataset" not in arguments:
        arguments += ["--limit", "1"]  # of the 60 packaged problems
    chat_class = None if arguments[0] == "up" else scripted
    expected_code = 3 if arguments[0] == "status" else 0
    assert run(*arguments, chat_class=chat_class) == expected_code, capsys.readouterr().err


def test_documented_make_targets_exist() -> None:
    targets = {shlex.split(line, comments=True)[1] for line in lines("make")}
    assert targets >= {"run", "test", "bench"}
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_relative_links_of_pages_have_targets() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} names {target}"
