"""When an engine last gave a token to anybody: a request that waits behind others is not stalled."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import ClassVar

from lookahead_agent.engines.protocol import Engine

_SECONDS_PER_PROMPT_TOKEN = 0.1  # granted to a prompt: more than the slowest measured processor needs to read one


@dataclass(eq=False)
class EngineProgress:
    """The latest token of an engine; replies in one event loop share it."""

    advanced_at: float = float("-inf")  # on the event loop's clock

    _by_engine: ClassVar[weakref.WeakKeyDictionary[Engine, EngineProgress]] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, engine: Engine) -> EngineProgress:
        """Return the progress of an engine; one that cannot be referred to weakly has none to share."""
        try:
            return cls._by_engine.setdefault(engine, cls())
        except TypeError:
            return cls()

    def advance(self, now: float) -> None:
        """Record a token."""
        self.advanced_at = now


def stall_limit(seconds: float, prompt_length: int) -> float:
    """The seconds without progress after which a request with a prompt of this length, in tokens, has stalled."""
    return seconds + _SECONDS_PER_PROMPT_TOKEN * prompt_length
