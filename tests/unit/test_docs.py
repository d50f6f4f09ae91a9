"""The Python in the documentation runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import lookahead_agent
from tests.unit.chat import scripted_chat
from tests.unit.conftest import ReplaceChat
from tests.unit.serving import serving

DOCS = Path(__file__).parents[2] / "docs"
REPLY = "First this.\n\nThen that.\n\nIt is 4."


def snippets(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)


def test_langchain(replace_chat: ReplaceChat, capsys: pytest.CaptureFixture[str]) -> None:
    real = lookahead_agent.ChatLookahead

    def scripted(**fields: Any) -> Any:
        return real(**fields) if "base_url" in fields else scripted_chat(REPLY, **fields)

    replace_chat(scripted)
    names: dict[str, Any] = {}
    for code in snippets("langchain.md"):
        exec(code, names)
    said = capsys.readouterr().out
    documented = " ".join(re.findall(r"^# (.*)$", "\n".join(snippets("langchain.md")), re.MULTILINE))
    assert said.strip() == documented
    assert names["thoughts"] == []


def test_server(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = snippets("server.md")
    with serving(scripted_chat(REPLY, policies={"planner": "exact"})) as (url, _):
        exec(code.replace("http://127.0.0.1:8000", url), {})
    assert capsys.readouterr().out == f"{REPLY} 1.0\n"
