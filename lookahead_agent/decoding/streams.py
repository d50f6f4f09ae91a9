"""Engine requests, and the steps that they write."""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace

from lookahead_agent.decoding.accounting import PromptCounts, ReplyClock, ReplyReport, TokenCounts
from lookahead_agent.decoding.prefixes import Prefixes
from lookahead_agent.decoding.request import DecodingSettings, ReplyRequest
from lookahead_agent.decoding.segmenter import Segmentation, Segmenter
from lookahead_agent.decoding.step import Node, Source, Step
from lookahead_agent.engines.protocol import Delta, Engine, Sampling
from lookahead_agent.engines.shared_draft import BufferLine, BufferLines
from lookahead_agent.engines.tokenizer import TextStream, Tokenizer

logger = logging.getLogger(__name__)

_PRECISION = 1.0  # seconds of a limit on silence: a timer that is set anew for every token takes longer than the token


@dataclass(eq=False)
class Stream:
    """One engine request, which writes several steps; its `line` shows them to a target with a shared draft."""

    source: Source
    sampling: Sampling
    deltas: AsyncGenerator[Delta, None]
    text: TextStream
    counts: TokenCounts
    line: BufferLine | None = None
    prompt: PromptCounts | None = None
    unread: deque[int] = field(default_factory=deque)
    finish_reason: str | None = None

    async def read(self) -> bool:
        """Wait for more tokens; False at the end of the stream."""
        async for delta in self.deltas:
            self.unread.extend(delta.token_ids)
            if self.line is not None:
                self.line.extend(delta.token_ids)
            if self.prompt is not None and delta.cached_tokens is not None:
                self.prompt.cached = delta.cached_tokens
            self.finish_reason = delta.finish_reason or self.finish_reason
            return True
        return False


@dataclass(eq=False)
class StepWriter:
    """A step that is being written, or was and is not decided."""

    job: int
    node: Node  # the prefix that the step follows
    stream: Stream
    segmenter: Segmenter  # has its tokens so far
    live: bool  # whether its tokens are part of the reply at once
    started: float  # in seconds since the reply began, as `ended`
    ended: float = 0.0
    complete: Step | None = None  # once it has ended
    refuted: frozenset[int] = frozenset()  # ranks of the draft's candidates that this (target) step has ruled out
    as_drafted: int = 0  # how many of its first tokens are known to be the draft's

    @property
    def generated(self) -> int:
        """Tokens that the engine generated for it."""
        return len(self.segmenter.token_ids)


@dataclass(eq=False)
class Streams:
    """The engine requests of one reply; `buffer` is where a target with a shared draft finds the draft's tokens."""

    request: ReplyRequest
    settings: DecodingSettings
    engines: Mapping[Source, Engine]
    prefixes: Prefixes
    report: ReplyReport
    clock: ReplyClock
    buffer: BufferLines | None
    writers: dict[int, StepWriter] = field(default_factory=dict)  # steps that are not decided, by job

    def __post_init__(self) -> None:
        engines = self.engines.items()
        self._rules = {source: step_rules(self.request, self.settings, each.tokenizer) for source, each in engines}
        # The stream of a job whose step was just written, for the job that writes the step after it.
        self._continuable: dict[int, Stream] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.limits = {Source.DRAFT: self.settings.draft_timeout, Source.TARGET: self.settings.target_timeout}
        self.draft_waited = 0.0  # seconds of the draft without a token, in steps that the target ended before
        self._draft_since = 0.0

    def start(
        self, job: int, node: Node, source: Source, rank: int, *, live: bool, awaits_thinking: bool
    ) -> StepWriter:
        """Begin the step after a node, in the stream of the step before where that goes on."""
        budget = self.request.sampling.max_tokens - self.prefixes.reply_length(node, source)
        sampling = self._sampling(node, source, rank)
        stream = self._continuable.get(node.job)
        if stream is not None and stream.source is source and stream.sampling == sampling:
            del self._continuable[node.job]
        else:
            stream = self._open(self.prefixes.ids(node, source), source, sampling, max(1, budget))
        rules = self._rules[source]
        if awaits_thinking and self.request.regions.thinking is not None:
            rules = replace(rules, thinking_marker=self.request.regions.thinking.open)
        segmenter = Segmenter(rules, stream.text, self.prefixes.context(node), budget)
        self.writers[job] = StepWriter(job, node, stream, segmenter, live, self.clock.now())
        return self.writers[job]

    def _open(self, prompt: list[int], source: Source, sampling: Sampling, max_tokens: int) -> Stream:
        engine, drafts = self.engines[source], source is Source.DRAFT
        deltas = engine.generate(prompt, replace(sampling, max_tokens=max_tokens))
        line = self.buffer.begin(prompt) if self.buffer is not None and drafts else None
        counts = self.report.draft_tokens if drafts else self.report.target_tokens
        first = self.report.first_prompt(source is Source.DRAFT, len(prompt))
        return Stream(source, sampling, deltas, engine.tokenizer.stream(prompt), counts, line, first)

    def _sampling(self, node: Node, source: Source, rank: int) -> Sampling:
        """The sampling of the step after a node: what is sampled alike may be written by one engine request.

        Seeded steps never are, since their random numbers must not depend on the request. A first candidate has the
        target's at each position, which makes the two agree more often.
        """
        sampling = replace(self.request.sampling, stop=())
        if sampling.temperature == 0:
            if source is Source.TARGET or rank == 0:
                return replace(sampling, seed=None)
            sampling = replace(sampling, temperature=self.settings.draft_temperature, seed=sampling.seed or 0)
        if sampling.seed is None:
            return sampling
        digest = hashlib.sha256(f"{sampling.seed}:{node.position}:{rank}".encode()).digest()
        return replace(sampling, seed=int.from_bytes(digest[:4]))

    def patience(self, source: Source) -> asyncio.Timeout:
        """The context in which a step is read, for `read`; it ends in TimeoutError if no token comes for too long."""
        now, limit = asyncio.get_running_loop().time(), self.limits[source]
        if source is Source.DRAFT:
            now = self._draft_since = now - self.draft_waited
        return asyncio.timeout_at(None if limit is None else now + limit)

    def given_up(self, source: Source) -> None:
        """A step was aborted while it was read."""
        if source is Source.DRAFT:
            self.draft_waited = asyncio.get_running_loop().time() - self._draft_since

    async def read(self, stream: Stream, silence: asyncio.Timeout) -> bool:
        """Wait for more tokens of a stream; False at its end."""
        more = await stream.read()
        when = silence.when()
        if when is not None and (limit := self.limits[stream.source]) is not None:
            now = asyncio.get_running_loop().time()
            if when < now + limit - _PRECISION:
                silence.reschedule(now + limit)
            if stream.source is Source.DRAFT:
                self._draft_since = now
        if stream.source is Source.DRAFT:
            self.clock.draft_writes()
            return more
        if self.clock.prompt is None:
            self.clock.prompt = self.clock.now()
        self.report.target_forward_passes += more
        return more

    def keep_open(self, job: int) -> None:
        """A job has written its step: the step after it may go on in its stream, if it starts before `unclaimed`."""
        if job in self.writers:
            self._continuable[job] = self.writers[job].stream

    def unclaimed(self) -> list[Stream]:
        """The streams that were kept open, and in which no step has gone on."""
        streams = list(self._continuable.values())
        self._continuable.clear()
        return streams

    def retire(self, stream: Stream, reader: asyncio.Task[None] | None = None) -> None:
        """Close a stream that nobody will read on, once the job that reads it has ended."""

        async def close() -> None:
            if reader is not None:
                await asyncio.wait({reader})
            await stream.deltas.aclose()

        stream.counts.aborted += len(stream.unread)
        stream.unread.clear()
        task = asyncio.get_running_loop().create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Abort every request and count its tokens; nobody reads any more."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        # One request may have written several steps that are not decided.
        streams = {writer.stream for writer in self.writers.values()} | set(self._continuable.values())
        for writer in self.writers.values():
            writer.stream.counts.aborted += writer.generated
        for stream in streams:
            stream.counts.aborted += len(stream.unread)
        for result in await asyncio.gather(*(stream.deltas.aclose() for stream in streams), return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("closing an engine request failed: %s", result)


def step_rules(request: ReplyRequest, settings: DecodingSettings, tokenizer: Tokenizer) -> Segmentation:
    """The rules by which a model's steps are cut."""
    regions, sampling = request.regions, request.sampling
    if sampling.structured is not None:
        # One step, and so one request: the constraint is on the reply, and every request begins it anew.
        return Segmentation(
            delimiter=None, max_step_tokens=sampling.max_tokens, stop=sampling.stop, eos_ids=tokenizer.eos_ids
        )
    close = regions.thinking.close if regions.thinking is not None else None
    # Past its thinking, a reply that must answer for itself is an action.
    own_answer = (close,) if close is not None and regions.answer_from_target else ()
    return Segmentation(
        delimiter=settings.delimiter,
        max_step_tokens=settings.max_step_tokens,
        step_tokens=settings.step_tokens,
        action_markers=regions.action_markers + own_answer,
        boundary=close,
        stop=sampling.stop,
        eos_ids=tokenizer.eos_ids,
    )
