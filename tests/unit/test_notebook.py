"""The notebook has its outputs, and its code runs as it is written, on a model that follows a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.testing import scripted_chat
from tests.unit.conftest import ReplaceChat
from tests.unit.test_examples import reply_to

NOTEBOOK = json.loads((Path(__file__).parents[2] / "examples" / "lookahead.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_was_run_from_beginning_to_end() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the picture"
    silent = [cell for cell in CODE if not cell["outputs"]]
    assert silent == CODE[-1:], "all but the last cell show something"


def test_it_has_no_paths_of_a_machine() -> None:
    text = json.dumps(NOTEBOOK)
    for path in ("/home/", "/work/", "/tmp/", "/root/", "site-packages"):
        assert path not in text


def test_its_code_runs(replace_chat: ReplaceChat, capsys: pytest.CaptureFixture[str]) -> None:
    def scripted(**fields: Any) -> Any:
        return scripted_chat(reply_to, **fields)

    replace_chat(scripted)
    names: dict[str, Any] = {}
    for cell in CODE:
        exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    assert "It is 36." in said
    assert "They cost $18." in said
    assert "2 of 2 steps are the draft's" in said
