"""What unit tests share."""

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
    """Gives examples and pages, which run as they are written, another `ChatLookahead` to import."""

    def replace(chat_class: Callable[..., Any]) -> None:
        monkeypatch.setattr(lookahead_agent, "ChatLookahead", chat_class, raising=False)

    return replace


@pytest.fixture
def measure_with() -> Iterator[MeasureWith]:
    """Has commands measure pairs of models otherwise."""
    before = PAIR_MEASUREMENT.set(PairMeasurement())
    yield PAIR_MEASUREMENT.set
    PAIR_MEASUREMENT.reset(before)
