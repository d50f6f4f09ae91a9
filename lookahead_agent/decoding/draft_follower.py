"""Lets the draft continue the target's own tokens, so that a target with a shared draft always has draft tokens."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from lookahead_agent.decoding.step import Source
from lookahead_agent.decoding.streams import StepWriter, Stream, Streams
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.shared_draft import BufferLines
from lookahead_agent.system.background import describe, is_cancelled, wait_for_end

logger = logging.getLogger(__name__)

BEHIND = 3  # tokens that the draft may be behind before it restarts from the target's last token
AHEAD = 64  # most tokens of one request: so far ahead, the draft has diverged more often than not


class DraftFollower:
    """Follows one of the target's streams while the draft has no step of its own to write.

    A draft request starts at the target's last token, and the buffer shows its tokens to the target. It restarts when
    the target diverges from it, and when the draft falls behind.
    """

    def __init__(self, draft: Engine, buffer: BufferLines, streams: Streams) -> None:
        request = streams.request
        self._draft = draft
        self._buffer = buffer
        self._sampling = replace(request.sampling, stop=(), structured=None)
        self._max_length = min(len(request.prompt_ids) + request.sampling.max_tokens, draft.context_length)
        self._streams = streams
        self._stream: Stream | None = None  # the target's stream that is followed
        self._tokens: list[int] = []  # the target's tokens: prompt, and reply so far
        self._base = 0  # index in `_tokens` where the draft request starts
        self._output: list[int] = []  # tokens of the draft request
        self._compared = 0  # number of compared tokens of `_output`
        self._task: asyncio.Task[None] | None = None  # the draft request
        self._open_tasks: set[asyncio.Task[None]] = set()  # draft requests that have not ended
        self._failed = False

    def step_started(self, writer: StepWriter) -> None:
        """Follow a live step: the draft writes no step in parallel with it."""
        if writer.live and writer.stream is not self._stream:
            self._follow(writer)

    def tokens_read(self, writer: StepWriter) -> None:
        """Compare a stream's new tokens, which are not split into steps yet, or start to follow the stream."""
        if writer.stream is self._stream:
            self._tokens.extend(writer.stream.unread)
            self._compare()
        elif writer.stream.source is Source.TARGET and writer.node.parent is None and self._has_diverged(writer):
            self._follow(writer)

    def step_ended(self, writer: StepWriter) -> None:
        """Leave the stream of a complete step, since the draft writes the next one; after a live step, stay."""
        if not writer.live:
            self.leave(writer.stream)

    def leave(self, stream: Stream) -> None:
        """Stop following a stream, if it is the followed one."""
        if stream is self._stream:
            self._stream = None
            self._stop()

    async def close(self) -> None:
        """Stop following, and wait until all draft requests have ended."""
        self._stop()
        await wait_for_end(self._open_tasks)
        self._buffer.close()

    def _has_diverged(self, writer: StepWriter) -> bool:
        """Whether the target's step has no draft candidate, or has diverged from it."""
        candidates = writer.node.candidates
        draft = self._streams.writers.get(candidates[0].job) if candidates and not writer.live else None
        if draft is None:
            return True
        target_ids, draft_ids = [*writer.segmenter.token_ids, *writer.stream.unread], draft.segmenter.token_ids
        common = min(len(target_ids), len(draft_ids))
        if any(target_ids[index] != draft_ids[index] for index in range(writer.matched_tokens, common)):
            return True
        writer.matched_tokens = common
        return False

    def _follow(self, writer: StepWriter) -> None:
        if not self._failed:
            self._stream = writer.stream
            prefix = self._streams.prefixes.ids(writer.node, Source.TARGET)
            self._tokens = [*prefix, *writer.segmenter.token_ids, *writer.stream.unread]
            self._restart()

    def _compare(self) -> None:
        """Restart the draft request if it diverged, fell behind, or ended without tokens ahead of the target."""
        common = min(len(self._tokens) - self._base, len(self._output))
        same = all(self._tokens[self._base + index] == self._output[index] for index in range(self._compared, common))
        self._compared = common
        behind = len(self._tokens) - self._base - len(self._output)
        ended = self._task is None or self._task.done()
        if not same or behind > BEHIND or (ended and behind >= 0):
            self._restart()

    def _restart(self) -> None:
        self._stop()
        remaining = self._max_length - len(self._tokens)
        if not self._failed and remaining >= 2:
            self._base, self._output, self._compared = len(self._tokens), [], 0
            self._task = asyncio.get_running_loop().create_task(self._write(list(self._tokens), min(AHEAD, remaining)))
            self._open_tasks.add(self._task)
            self._task.add_done_callback(self._open_tasks.discard)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _write(self, prefix: Sequence[int], limit: int) -> None:
        line, report, clock = self._buffer.begin(prefix), self._streams.report, self._streams.clock
        prompt = report.first_prompt(True, len(prefix))
        try:
            with clock.draft:
                async with aclosing(self._draft.generate(prefix, replace(self._sampling, max_tokens=limit))) as deltas:
                    async for delta in deltas:
                        if clock.draft_prompt is None:
                            clock.draft_prompt = clock.draft.seconds
                        if prompt is not None and delta.cached_tokens is not None:
                            prompt.cached = delta.cached_tokens
                        report.draft_tokens.speculative += len(delta.token_ids)
                        if self._task is not asyncio.current_task():
                            continue  # cancelled: another request has replaced it
                        if line is not None:
                            line.extend(delta.token_ids)
                        self._output.extend(delta.token_ids)
                        self._compare()
        except BaseException as error:
            if is_cancelled() and isinstance(error, asyncio.CancelledError):
                raise
            # Draft tokens only save time: the target continues without them.
            self._failed = True
            logger.warning("no more draft tokens: %s", describe(error))
