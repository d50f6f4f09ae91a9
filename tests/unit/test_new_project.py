from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead_agent.agents.new_project import PROJECTS, project_files
from lookahead_agent.cli.new import new
from lookahead_agent.errors import ConfigurationError


@pytest.mark.parametrize("template", PROJECTS)
def test_its_own_test_passes(tmp_path: Path, template: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my-agent"
    new(folder, template)
    assert "pytest" in capsys.readouterr().out
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # The plugins that are installed here are none of the project's.
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=400, check=False)
    assert process.returncode == 0, process.stdout
    assert "1 passed" in process.stdout
    assert json.loads((folder / "langgraph.json").read_text())["graphs"] == {"my-agent": "./agent.py:graph"}
    compile((folder / "main.py").read_text(), "main.py", "exec")


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is there already"):
        new(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_template_has_a_project() -> None:
    graphs = Path(__file__).parents[2] / "graphs"
    assert {path.stem for path in graphs.glob("*.py")} == set(PROJECTS)
    assert "tools/calculator.py" in project_files("x", "react")
