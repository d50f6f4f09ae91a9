"""The README's Python runs as it is written there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.timeout(1200)
def test_the_example_runs(real: ChatLookahead, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    real.close()  # the example chooses its own arrangement, and both would not fit into memory
    exec(example, names)
    assert names["message"].response_metadata["lookahead"]["policy"] == "balanced"
    *_, rate = capsys.readouterr().out.split()
    assert 0 <= float(rate) <= 1
    assert set(names["graph"].get_graph().nodes) >= {"planner", "executor", "finisher"}
    assert names["llm"].explain(), "what was chosen, and why"
    names["llm"].close()
