"""The speed of replies is kept by configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookahead_agent.hardware.reply_speeds import ReplySpeeds


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    return tmp_path


def test_speeds_are_kept_by_configuration(cache: Path) -> None:
    speeds = ReplySpeeds(["target", "draft"])
    assert speeds.paces() == {}
    speeds.add("shared_draft", 0.1)
    speeds.add("shared_draft", 0.1)
    assert speeds.paces() == {}, "two may be chance"
    for _ in range(3):
        speeds.add("shared_draft", 9.0)  # another program used the cores
    assert speeds.acceptance_rate() is None
    for _ in range(3):
        speeds.add("none", 0.2, acceptance_rate=0.9)
    assert ReplySpeeds(["target", "draft"]).paces() == {"shared_draft": 0.1, "none": 0.2}
    assert ReplySpeeds(["target", "draft"]).acceptance_rate() == 0.9
    assert ReplySpeeds(["target", "other"]).paces() == {}
    (file,) = cache.glob("hardware/speeds-*.json")
    for _ in range(100):
        speeds.add("shared_draft", 0.3)
    assert speeds.paces()["shared_draft"] == 0.3
    assert len(file.read_text()) < 1000
    file.write_text("[]")
    assert speeds.paces() == {}
