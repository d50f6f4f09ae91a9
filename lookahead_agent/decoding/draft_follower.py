"""A draft that writes on from the target's own tokens, so that a target with a shared draft always has draft tokens."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from lookahead_agent.decoding.step import Source
from lookahead_agent.decoding.streams import StepWriter, Stream, Streams
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.shared_draft import BufferLines

logger = logging.getLogger(__name__)

BEHIND = 3  # tokens that the draft may be behind the target before it begins anew from the target's last token
AHEAD = 64  # tokens that one request writes: a draft that runs far ahead is wrong by then more often than not


class DraftFollower:
    """Follows one of the target's streams, where the draft has no step of its own to write for it.

    A request of the draft begins at the target's last token, and the buffer shows the target what it writes. It
    begins anew where the target writes something else, and where the draft has fallen behind.
    """

    def __init__(self, draft: Engine, buffer: BufferLines, streams: Streams) -> None:
        request = streams.request
        self._draft = draft
        self._buffer = buffer
        self._sampling = replace(request.sampling, stop=(), structured=None)
        self._max_length = min(len(request.prompt_ids) + request.sampling.max_tokens, draft.context_length)
        self._streams = streams
        self._stream: Stream | None = None  # of the target, which is followed
        self._tokens: list[int] = []  # the target's: prompt, and reply as far as it is written
        self._begun = 0  # where the running request began in them
        self._written: list[int] = []
        self._compared = 0  # of what is written
        self._running: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._failed = False

    def step_started(self, writer: StepWriter) -> None:
        """A step begins; the draft writes none beside a live one."""
        if writer.live and writer.stream is not self._stream:
            self._follow(writer)

    def tokens_read(self, writer: StepWriter) -> None:
        """A stream has brought tokens, which are not cut into steps yet."""
        if writer.stream is self._stream:
            self._tokens.extend(writer.stream.unread)
            self._compare()
        elif writer.stream.source is Source.TARGET and writer.node.parent is None and self._has_left_draft(writer):
            self._follow(writer)

    def step_ended(self, writer: StepWriter) -> None:
        """A step is complete; the draft has the next one to write unless that is live too."""
        if not writer.live:
            self.leave(writer.stream)

    def leave(self, stream: Stream) -> None:
        """Follow a stream no longer, if it is followed."""
        if stream is self._stream:
            self._stream = None
            self._stop()

    async def close(self) -> None:
        """Follow nothing, and wait until the draft's requests are ended."""
        self._stop()
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._buffer.close()

    def _has_left_draft(self, writer: StepWriter) -> bool:
        """Whether the draft's candidate for a step cannot tell the target any more what follows."""
        candidates = writer.node.open_candidates
        draft = self._streams.writers.get(candidates[0].written_by or 0) if candidates and not writer.live else None
        if draft is None:
            return True
        mine, drafts = [*writer.segmenter.token_ids, *writer.stream.unread], draft.segmenter.token_ids
        both = min(len(mine), len(drafts))
        if any(mine[index] != drafts[index] for index in range(writer.as_drafted, both)):
            return True
        writer.as_drafted = both
        return False

    def _follow(self, writer: StepWriter) -> None:
        if not self._failed:
            self._stream = writer.stream
            prefix = self._streams.prefixes.ids(writer.node, Source.TARGET)
            self._tokens = [*prefix, *writer.segmenter.token_ids, *writer.stream.unread]
            self._restart()

    def _compare(self) -> None:
        """Begin anew if the draft's tokens are not the target's, or come too late."""
        both = min(len(self._tokens) - self._begun, len(self._written))
        same = all(self._tokens[self._begun + index] == self._written[index] for index in range(self._compared, both))
        self._compared = both
        behind = len(self._tokens) - self._begun - len(self._written)
        ended = self._running is None or self._running.done()
        if not same or behind > BEHIND or (ended and behind >= 0):
            self._restart()

    def _restart(self) -> None:
        self._stop()
        room = self._max_length - len(self._tokens)
        if not self._failed and room >= 2:
            self._begun, self._written, self._compared = len(self._tokens), [], 0
            self._running = asyncio.get_running_loop().create_task(self._write(list(self._tokens), min(AHEAD, room)))
            self._ending.add(self._running)
            self._running.add_done_callback(self._ending.discard)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            self._running = None

    async def _write(self, prefix: Sequence[int], most: int) -> None:
        line, report, clock = self._buffer.begin(prefix), self._streams.report, self._streams.clock
        prompt = report.first_prompt(True, len(prefix))
        try:
            with clock.draft:
                async with aclosing(self._draft.generate(prefix, replace(self._sampling, max_tokens=most))) as deltas:
                    async for delta in deltas:
                        clock.draft_writes()
                        if prompt is not None and delta.cached_tokens is not None:
                            prompt.cached = delta.cached_tokens
                        report.draft_tokens.speculative += len(delta.token_ids)
                        if self._running is not asyncio.current_task():
                            continue  # it is being ended
                        if line is not None:
                            line.extend(delta.token_ids)
                        self._written.extend(delta.token_ids)
                        self._compare()
        except Exception as error:
            # Draft tokens are help that the target can do without.
            self._failed = True
            logger.warning("no more draft tokens: %s", str(error) or type(error).__name__)
