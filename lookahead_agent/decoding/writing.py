"""Engine requests, and the steps that are written by them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from lookahead_agent.decoding.segmenter import Segmenter
from lookahead_agent.decoding.tree import Node, Source
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.tokenizer import TextStream
from lookahead_agent.step import Step


class Stream:
    """One engine request. It may write several steps, one job after another, and is closed once.

    Args:
        source: Whose engine it is.
        sampling: How its tokens are chosen.
        deltas: What the engine streams.
        text: Decodes the tokens.
    """

    def __init__(
        self, source: Source, sampling: Sampling, deltas: AsyncGenerator[Delta, None], text: TextStream
    ) -> None:
        self.source = source
        self.sampling = sampling
        self.text = text
        self.unread: deque[int] = deque()
        self.finish_reason: str | None = None
        self._deltas = deltas

    async def read(self) -> bool:
        """Wait for more tokens; False at the end of the stream."""
        async for delta in self._deltas:
            self.unread.extend(delta.token_ids)
            self.finish_reason = delta.finish_reason or self.finish_reason
            return True
        return False

    async def close(self) -> None:
        """Abort the request if it still runs."""
        await self._deltas.aclose()


@dataclass
class WriteJob:
    """A step that is being written, or was; if `live`, its tokens are certain as they come.

    Attributes:
        node: The prefix that the step follows.
        stream: Where its tokens come from.
        segmenter: Has its tokens so far.
        live: Whether its tokens are part of the reply as they come.
        started: When it began, in seconds since the reply did.
        ended: When it ended.
        complete: The step, once it has ended.
        refuted: Ranks of the draft's candidates that this (target) step has ruled out.
    """

    node: Node
    stream: Stream
    segmenter: Segmenter
    live: bool
    started: float
    ended: float = 0.0
    complete: Step | None = None
    refuted: frozenset[int] = frozenset()

    @property
    def generated(self) -> int:
        """Tokens that the engine generated for it."""
        return len(self.segmenter.token_ids)
