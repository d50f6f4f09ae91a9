"""The notebook contains its outputs, and its code runs unchanged on a scripted model."""

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


def test_every_cell_was_executed_in_order_and_without_errors() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the notebook shows a picture"
    without_output = [cell for cell in CODE if not cell["outputs"]]
    assert without_output == CODE[-1:], "only the last cell has no output"


def test_notebook_contains_no_local_paths() -> None:
    text = json.dumps(NOTEBOOK)
    for path in ("/home/", "/work/", "/tmp/", "/root/", "site-packages"):
        assert path not in text


def test_notebook_code_runs_on_a_scripted_model(replace_chat: ReplaceChat, capsys: pytest.CaptureFixture[str]) -> None:
    def make_chat(**fields: Any) -> Any:
        return scripted_chat(reply_to, **fields)

    replace_chat(make_chat)
    names: dict[str, Any] = {}
    for cell in CODE:
        exec("".join(cell["source"]), names)
    output = capsys.readouterr().out
    assert "It is 36." in output
    assert "They cost $18." in output
    assert "2 of 2 steps are the draft's" in output
