"""Time between a call and its first chunk beside the engine's own: the default pair in its default configuration."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.protocol import Delta, Engine, Sampling
from lookahead_agent.runtime.engine_set import EngineSet

CALLS, WARMUP = 12, 2


class TimedEngine:
    """Keeps the times at which the last request began and had its first token."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.begun = self.first = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Generate as the engine does."""
        self.begun, self.first = time.perf_counter(), 0.0
        async with aclosing(self._engine.generate(prompt_ids, sampling)) as deltas:
            async for delta in deltas:
                self.first = self.first or time.perf_counter()
                yield delta


def main() -> None:
    """Print the milliseconds of each call and their median."""
    beside = []
    with ChatLookahead(temperature=0, use_daemon=False) as started:
        started.start()
        assert started.backend.running is not None
        engine = TimedEngine(started.backend.running.target)
        llm = ChatLookahead(engines=EngineSet(cast(Engine, engine)), temperature=0)
        for number in range(CALLS):
            begun = time.perf_counter()
            chunks = llm.stream(f"What is {number} plus {number + 3}? One word.", max_tokens=4)
            next(chunk for chunk in chunks if chunk.text)
            arrived = time.perf_counter()
            before, after = engine.begun - begun, arrived - engine.first
            beside.append(1000 * (before + after))
            print(f"before the engine {1000 * before:.1f} ms, after its first token {1000 * after:.1f} ms")
    print(f"median after {WARMUP} calls: {statistics.median(beside[WARMUP:]):.1f} ms")


if __name__ == "__main__":
    main()
