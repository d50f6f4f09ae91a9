"""The README's Python example runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.packaged
@pytest.mark.timeout(1200)
def test_readme_example_runs(
    default_llm: ChatLookahead, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    metadata = names["message"].response_metadata["lookahead"]
    assert metadata["policy"] == "balanced"
    *reply_lines, counts, answer = capsys.readouterr().out.strip().split("\n", names["message"].text.count("\n") + 2)
    assert "84" in "\n".join(reply_lines)
    tokens, passes = map(int, counts.split())
    assert 0 < passes <= tokens
    assert answer == names["state"]["messages"][-1].text
    assert "360" in answer
    assert any(message.type == "tool" for message in names["state"]["messages"])
    assert names["llm"].explain(), "`explain` shows the configuration and its reasons"
    assert names["llm"].backend.runtime is default_llm.backend.runtime, "equal models share their engines"
    names["llm"].close()
