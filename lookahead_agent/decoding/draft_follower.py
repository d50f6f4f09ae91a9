"""A draft that writes on from the target's own words, so that a target with a shared draft never has to go alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from lookahead_agent.decoding.accounting import BusyClock, TokenCounts
from lookahead_agent.engines.protocol import DraftLines, Engine, Sampling

logger = logging.getLogger(__name__)

BEHIND = 3
"""Tokens that the draft may be behind the target before it begins anew from the target's last word."""
AHEAD = 64
"""Tokens that one request writes: a draft that runs far ahead is wrong by then more often than not."""


class DraftFollower:
    """Follows one piece of the target's writing.

    A request of the draft begins at the target's last word and shows what it writes to the target, which guesses by it.
    It begins anew where the target says something else, and where the draft has fallen behind.

    Args:
        draft: Writes the guesses.
        draft_lines: Where they are shown.
        sampling: How the draft chooses tokens.
        token_counts: Counts the draft's tokens.
        at_work: Runs while the draft writes.
        budget: Tokens that prompt and reply may have together.
    """

    def __init__(
        self,
        draft: Engine,
        draft_lines: DraftLines,
        sampling: Sampling,
        token_counts: TokenCounts,
        at_work: BusyClock,
        budget: int,
    ) -> None:
        self._draft = draft
        self._draft_lines = draft_lines
        self._sampling = sampling
        self._token_counts = token_counts
        self._at_work = at_work
        self._budget = budget
        self._words: list[int] = []  # the target's: prompt, and reply as far as it is written
        self._begun = 0  # where the running request began in them
        self._written: list[int] = []
        self._compared = 0  # of what is written
        self._running: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.failure: str | None = None
        """Why there are no guesses any more; None if there are."""

    @property
    def follows(self) -> bool:
        """Whether it follows the target at present."""
        return bool(self._words)

    def begin(self, words: Sequence[int]) -> None:
        """Follow the target from here: `words` are prompt and reply so far, shape (n,)."""
        self._words = list(words)
        self._restart()

    def follow(self, token_ids: Iterable[int]) -> None:
        """The target has written more."""
        self._words.extend(token_ids)
        self._compare()

    def leave(self) -> None:
        """Follow no longer; `begin` may be called again."""
        self._words = []
        self._stop()

    async def close(self) -> None:
        """Leave, and wait until the draft's requests are ended."""
        self.leave()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _compare(self) -> None:
        """Begin anew if the draft's words are not the target's, or come too late."""
        both = min(len(self._words) - self._begun, len(self._written))
        same = all(self._words[self._begun + index] == self._written[index] for index in range(self._compared, both))
        self._compared = both
        behind = len(self._words) - self._begun - len(self._written)
        ended = self._running is None or self._running.done()
        if not same or behind > BEHIND or (ended and behind >= 0):
            self._restart()

    def _restart(self) -> None:
        self._stop()
        room = self._budget - len(self._words)
        if self.failure is not None or room < 2:
            return
        self._begun, self._written, self._compared = len(self._words), [], 0
        self._running = asyncio.get_running_loop().create_task(self._write(list(self._words), min(AHEAD, room)))
        self._ending.add(self._running)
        self._running.add_done_callback(self._ending.discard)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            self._running = None

    async def _write(self, words: list[int], most: int) -> None:
        line = self._draft_lines.begin(words)
        try:
            with self._at_work:
                async with aclosing(self._draft.generate(words, replace(self._sampling, max_tokens=most))) as deltas:
                    async for delta in deltas:
                        self._token_counts.speculative += len(delta.token_ids)
                        if self._running is not asyncio.current_task():
                            continue  # it is being ended
                        if line is not None:
                            line.extend(delta.token_ids)
                        self._written.extend(delta.token_ids)
                        self._compare()
        except Exception as error:
            # Guesses are help that the target can do without.
            self.failure = str(error) or type(error).__name__
            logger.warning("no more guesses from the draft: %s", self.failure)
