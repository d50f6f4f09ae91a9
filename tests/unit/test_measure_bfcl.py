"""The script that measures BFCL, on two tasks per category and a checker with the interface of BFCL's."""

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
    """A folder with the layout of bfcl-eval."""
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
            for row, subfolder in ((task, ""), (answer, "possible_answer")):
                with (package / "data" / subfolder / f"BFCL_v4_{category}.json").open("a") as file:
                    file.write(json.dumps(row) + "\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "bfcl"
    for name in [name for name in sys.modules if name.startswith("bfcl_eval")]:
        del sys.modules[name]


def test_script_measures_both_configurations_and_resumes_an_earlier_run(
    bfcl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replace_chat: ReplaceChat,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat_fields: list[dict[str, Any]] = []

    def reply(prompt: str) -> str:
        assert '"type": {"type": "number"}' in prompt, "a parameter may have the name type"
        assert '"pair": {"type": "array"}' in prompt
        double = prompt.rpartition("half of ")[2].split("?")[0]
        return f'```json\n{{"name": "math_half", "arguments": {{"type": {double}}}}}\n```'

    def chat(**fields: Any) -> Any:
        chat_fields.append(fields)
        script = reply if len(chat_fields) != 3 else lambda prompt: reply(prompt).replace("\n```", " \n```")
        return scripted_chat(script, **fields)

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [EXAMPLE.name, str(bfcl), "--out", str(out), *arguments])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    replace_chat(chat)
    out = tmp_path / "rows.jsonl"
    run("--configuration", "plain", "--limit", "1")
    output = run("--configuration", "plain", "--configuration", "default")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    measured = [row["id"] for row in rows if row["configuration"] == "plain"]
    assert sorted(measured) == sorted(f"{category}_{number}" for category in CATEGORIES for number in (0, 1))
    assert rows[0]["calls"] == [{"name": "math_half", "args": {"type": 8}}]
    assert rows[0]["correct"] is True
    assert [(fields.get("policy"), fields.get("precision")) for fields in chat_fields] == [
        ("off", "int8"),
        ("off", "int8"),
        (None, None),
    ]
    assert "16 at once, multiple: 2 tasks, correct (plain, default): [1, 1]" in output
    assert "accuracy of default minus plain: +0.000" in output
    differing = output.rpartition("replies that differ: ")[2]
    assert all(name in differing for name in measured), "a reply that differs only in white space is listed"
