"""Engine requests, and the steps that are written by them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from lookahead_agent.decoding.segmenter import Segmenter
from lookahead_agent.decoding.step import Step
from lookahead_agent.decoding.tree import Node, Source
from lookahead_agent.engines.protocol import Delta, DraftLine, Sampling
from lookahead_agent.engines.tokenizer import TextStream


class Stream:
    """One engine request. It may write several steps, one job after another, and is closed once.

    Args:
        source: Whose engine it is.
        sampling: How its tokens are chosen.
        deltas: What the engine streams.
        text: Decodes the tokens.
        draft_line: Where the tokens are shown to a target with a shared draft.
    """

    def __init__(
        self,
        source: Source,
        sampling: Sampling,
        deltas: AsyncGenerator[Delta, None],
        text: TextStream,
        draft_line: DraftLine | None = None,
    ) -> None:
        self.source = source
        self.sampling = sampling
        self.text = text
        self.unread: deque[int] = deque()
        self.finish_reason: str | None = None
        self._deltas = deltas
        self._draft_line = draft_line

    async def read(self) -> bool:
        """Wait for more tokens; False at the end of the stream."""
        async for delta in self._deltas:
            self.unread.extend(delta.token_ids)
            if self._draft_line is not None:
                self._draft_line.extend(delta.token_ids)
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
        as_drafted: How many of its first tokens are known to be the draft's.
    """

    node: Node
    stream: Stream
    segmenter: Segmenter
    live: bool
    started: float
    ended: float = 0.0
    complete: Step | None = None
    refuted: frozenset[int] = frozenset()
    as_drafted: int = 0

    @property
    def generated(self) -> int:
        """Tokens that the engine generated for it."""
        return len(self.segmenter.token_ids)
