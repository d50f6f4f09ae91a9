"""The measurement of BFCL, with a data set of two tasks and a checker of the same shape as BFCL's."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.testing import scripted_chat
from tests.unit.conftest import ReplaceChat

EXAMPLE = Path(__file__).parents[2] / "examples" / "measure_bfcl.py"
CHECKER = """
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING

def ast_checker(functions, made, answers, language, category, model):
    assert MODEL_CONFIG_MAPPING[model].underscore_to_dot
    assert (language, functions[0]["parameters"]["type"]) == ("python", "dict")
    return {"valid": made == answers}
"""
CATEGORIES = ("simple_python", "multiple", "parallel")


@pytest.fixture
def bfcl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like that of bfcl-eval."""
    package = tmp_path / "bfcl" / "bfcl_eval"
    for folder in ("constants", "eval_checker/ast_eval", "data/possible_answer"):
        (package / folder).mkdir(parents=True)
    (package / "constants" / "enums.py").write_text("class Language:\n    PYTHON = 'python'\n")
    (package / "eval_checker" / "ast_eval" / "ast_checker.py").write_text(CHECKER)
    arguments = {"type": "dict", "properties": {"type": {"type": "float"}, "pair": {"type": "tuple"}}}
    for category in CATEGORIES:
        for number, half in enumerate((4, 5)):
            task = {
                "id": f"{category}_{number}",
                "question": [[{"role": "user", "content": f"What is half of {2 * half}?"}]],
                "function": [{"name": "math.half", "description": "Half.", "parameters": arguments}],
            }
            answer = {"id": task["id"], "ground_truth": [{"math_half": {"type": 8}}]}
            for row, part in ((task, ""), (answer, "possible_answer")):
                with (package / "data" / part / f"BFCL_v4_{category}.json").open("a") as file:
                    file.write(json.dumps(row) + "\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "bfcl"
    for name in [name for name in sys.modules if name.startswith("bfcl_eval")]:
        del sys.modules[name]


def test_it_measures_both_and_goes_on_where_it_was(
    bfcl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replace_chat: ReplaceChat,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[dict[str, Any]] = []

    def reply(prompt: str) -> str:
        assert '"type": {"type": "number"}' in prompt, "a parameter may be called type"
        assert '"pair": {"type": "array"}' in prompt
        double = prompt.rpartition("half of ")[2].split("?")[0]
        return f'```json\n{{"name": "math_half", "arguments": {{"type": {double}}}}}\n```'

    def chat(**fields: Any) -> Any:
        made.append(fields)
        other = reply if len(made) != 3 else lambda prompt: reply(prompt).replace("\n```", " \n```")
        return scripted_chat(other, **fields)

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [EXAMPLE.name, str(bfcl), "--out", str(out), *arguments])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    replace_chat(chat)
    out = tmp_path / "rows.jsonl"
    run("--configuration", "plain", "--limit", "1")
    said = run("--configuration", "plain", "--configuration", "default")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    measured = [row["id"] for row in rows if row["configuration"] == "plain"]
    assert sorted(measured) == sorted(f"{category}_{number}" for category in CATEGORIES for number in (0, 1))
    assert rows[0]["calls"] == [{"name": "math_half", "args": {"type": 8}}]
    assert rows[0]["correct"] is True
    assert [(fields.get("policy"), fields.get("precision")) for fields in made] == [
        ("off", "int8"),
        ("off", "int8"),
        (None, None),
    ]
    assert "16 at once, multiple: 2 tasks, correct (plain, default): [1, 1]" in said
    assert "accuracy of default minus plain: +0.000" in said
    differing = said.rpartition("replies that differ: ")[2]
    assert all(name in differing for name in measured), "white space is a difference"
