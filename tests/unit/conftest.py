"""What unit tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import lookahead_agent

ReplaceChat = Callable[[Callable[..., Any]], None]


@pytest.fixture
def replace_chat(monkeypatch: pytest.MonkeyPatch) -> ReplaceChat:
    """Gives examples and pages, which run as they are written, another `ChatLookahead` to import."""

    def replace(chat_class: Callable[..., Any]) -> None:
        monkeypatch.setattr(lookahead_agent, "ChatLookahead", chat_class, raising=False)

    return replace
