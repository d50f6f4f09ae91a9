"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lookahead_agent
from lookahead_agent.cost_model.pair import PAIR_MEASUREMENT, PairMeasurement

MeasureWith = Callable[[PairMeasurement], object]
ReplaceChat = Callable[[Callable[..., Any]], None]


@pytest.fixture
def replace_chat(monkeypatch: pytest.MonkeyPatch) -> ReplaceChat:
    """Replaces `lookahead_agent.ChatLookahead`, which unmodified examples and pages import."""

    def replace(chat_class: Callable[..., Any]) -> None:
        monkeypatch.setattr(lookahead_agent, "ChatLookahead", chat_class, raising=False)

    return replace


@pytest.fixture
def measure_with() -> Iterator[MeasureWith]:
    """Replaces the functions with which commands measure a model pair."""
    before = PAIR_MEASUREMENT.set(PairMeasurement())
    yield PAIR_MEASUREMENT.set
    PAIR_MEASUREMENT.reset(before)
