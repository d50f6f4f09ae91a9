"""The README's Python runs as it is written there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.packaged
@pytest.mark.timeout(1200)
def test_the_example_runs(by_itself: ChatLookahead, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["message"].response_metadata["lookahead"]["policy"] == "balanced"
    *_, rate = capsys.readouterr().out.split()
    assert 0 <= float(rate) <= 1
    assert set(names["graph"].get_graph().nodes) >= {"planner", "executor", "finisher"}
    assert names["llm"].explain(), "what was chosen, and why"
    assert names["llm"].backend.runtime is by_itself.backend.runtime, "models of one configuration share their engines"
    names["llm"].close()
