"""Engine requests, and the steps that they write."""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from lookahead_agent.decoding.accounting import EngineProgress, PromptCounts, ReplyClock, ReplyReport, TokenCounts
from lookahead_agent.decoding.prefixes import Prefixes
from lookahead_agent.decoding.request import DecodingSettings, ReplyRequest
from lookahead_agent.decoding.segmenter import Segmentation, Segmenter
from lookahead_agent.decoding.step import Node, Source, Step
from lookahead_agent.decoding.thinking import closing_tokens
from lookahead_agent.engines.protocol import Delta, Engine, Sampling
from lookahead_agent.engines.shared_draft import BufferLine, BufferLines
from lookahead_agent.engines.tokenizer import TextStream, Tokenizer
from lookahead_agent.system.background import close_request, wait_for_end

_PRECISION = 1.0  # seconds that a timeout may be early: rescheduling it for each token would cost more than the token


@dataclass(eq=False)
class Stream:
    """One engine request, which may write several steps; `line` shows them to a target with a shared draft."""

    source: Source
    sampling: Sampling
    deltas: AsyncGenerator[Delta, None]
    text: TextStream
    counts: TokenCounts
    line: BufferLine | None = None
    prompt: PromptCounts | None = None
    prompt_length: int = 0
    resumptions: int = 0  # how often its engine failed and went on, as far as the report does not count it
    proposals: tuple[int, int] = (0, 0)  # draft tokens of its engine: proposed, accepted
    unread: deque[int] = field(default_factory=deque)
    finish_reason: str | None = None

    async def read(self) -> bool:
        """Add the next delta's tokens to `unread`; False at the end of the stream."""
        async for delta in self.deltas:
            self.unread.extend(delta.token_ids)
            if self.line is not None:
                self.line.extend(delta.token_ids)
            if self.prompt is not None and delta.cached_tokens is not None:
                self.prompt.cached = delta.cached_tokens
            self.resumptions += delta.resumptions
            self.proposals = delta.proposals or self.proposals
            self.finish_reason = delta.finish_reason or self.finish_reason
            return True
        return False


@dataclass(eq=False)
class StepWriter:
    """A step that is being written, or is complete and undecided."""

    job: int
    node: Node  # the prefix that the step follows
    stream: Stream
    segmenter: Segmenter  # collects the step's tokens
    live: bool  # whether each token is committed as soon as it is read
    started: float  # time on the event loop's clock, like `ended`
    ended: float = 0.0
    complete: Step | None = None  # the complete step, in the target's tokens
    refuted: frozenset[int] = frozenset()  # ranks of the draft candidates that this target step has ruled out
    matched_tokens: int = 0  # length of the prefix that is known to equal the draft's step, in tokens


@dataclass(eq=False)
class Streams:
    """The engine requests of one reply; a target with a shared draft reads the draft's tokens from `buffer`."""

    request: ReplyRequest
    settings: DecodingSettings
    engines: Mapping[Source, Engine]
    prefixes: Prefixes
    report: ReplyReport
    clock: ReplyClock
    buffer: BufferLines | None
    writers: dict[int, StepWriter] = field(default_factory=dict)  # undecided steps, by job

    def __post_init__(self) -> None:
        engines = self.engines.items()
        self._close = partial(closing_tokens, self.engines[Source.TARGET].tokenizer)
        self._rules = {source: step_rules(self.request, self.settings, engine.tokenizer) for source, engine in engines}
        # Each job that has just completed its step has its stream, in which the next step may continue.
        self._continuable: dict[int, Stream] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.limits = {Source.DRAFT: self.settings.draft_timeout, Source.TARGET: self.settings.target_timeout}
        self.draft_waited = 0.0  # seconds since the draft's last token, carried over from aborted steps
        self.draft_silent_since = 0.0
        self.progress = {source: EngineProgress.of(engine) for source, engine in engines}

    def start(
        self, job: int, node: Node, source: Source, rank: int, *, live: bool, awaits_thinking: bool
    ) -> StepWriter:
        """Start the step after a node, in the previous step's stream if that can continue."""
        sampling, now = self._sampling(node, source, rank), asyncio.get_running_loop().time()
        context, thinking = self.prefixes.context(node), self.prefixes.thinking(node, source)
        length = self.prefixes.reply_length(node, source)
        budget = self.request.sampling.max_tokens - length
        stream = self._continuable.get(node.job)
        # After tokens that no engine generated, the next step takes a request of its own.
        diverged = node.step is not None and node.step.closing_tokens > 0
        if stream is not None and stream.source is source and stream.sampling == sampling and not diverged:
            del self._continuable[node.job]
        else:
            stream = self._open(self.prefixes.ids(node, source), source, sampling, max(1, budget), length > 0)
        if source is Source.DRAFT:
            self.draft_silent_since = now - self.draft_waited
        rules = self._rules[source]
        if awaits_thinking and self.request.regions.thinking is not None:
            rules = replace(rules, thinking_marker=self.request.regions.thinking.open)
        close = self._close if source is Source.TARGET else None
        segmenter = Segmenter(rules, stream.text, context, budget, thinking, close)
        self.writers[job] = StepWriter(job, node, stream, segmenter, live, now)
        return self.writers[job]

    def _open(self, prompt: list[int], source: Source, sampling: Sampling, max_tokens: int, in_reply: bool) -> Stream:
        engine, drafts = self.engines[source], source is Source.DRAFT
        sent = replace(sampling, max_tokens=max_tokens, in_reply=sampling.in_reply or in_reply)
        deltas = engine.generate(prompt, sent)
        line = self.buffer.begin(prompt) if self.buffer is not None and drafts else None
        counts = self.report.draft_tokens if drafts else self.report.target_tokens
        first = self.report.first_prompt(source is Source.DRAFT, len(prompt))
        return Stream(source, sampling, deltas, engine.tokenizer.stream(prompt), counts, line, first, len(prompt))

    def _sampling(self, node: Node, source: Source, rank: int) -> Sampling:
        """The sampling of the step after a node; one engine request may write steps of equal sampling.

        A seeded step has a seed of its own, since its random numbers must not depend on the request. The first
        candidate has the target's seed at each position, which makes the two agree more often.
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

    def idle_timeout(self, source: Source) -> asyncio.Timeout:
        """Create the context in which a step is read: TimeoutError if no token arrives within the model's limit."""
        now, limit = asyncio.get_running_loop().time(), self.limits[source]
        if source is Source.DRAFT:
            now -= self.draft_waited
        return asyncio.timeout_at(None if limit is None else now + limit)

    def draft_aborted(self) -> None:
        """Record that a draft step was aborted while it was being read, before another one starts."""
        self.draft_waited = asyncio.get_running_loop().time() - self.draft_silent_since

    async def read(self, stream: Stream, idle_timeout: asyncio.Timeout) -> bool:
        """Read a stream's next tokens and extend its timeout; False at the end of the stream."""
        more = await stream.read()
        # A delta without tokens only shows that the engine works.
        progresses = not more or bool(stream.unread) or stream.finish_reason is not None
        when, now = idle_timeout.when(), asyncio.get_running_loop().time()
        limit = self.limits[stream.source]
        if progresses and when is not None and limit is not None and when < now + limit - _PRECISION:
            idle_timeout.reschedule(now + limit)
        self.progress[stream.source].advanced_at = now
        if stream.source is Source.DRAFT:
            self.draft_silent_since = now
            if self.clock.draft_prompt is None:
                self.clock.draft_prompt = self.clock.draft.seconds
            return more
        if not progresses:
            return more
        if self.clock.prompt is None:
            self.clock.prompt = now - self.clock.began
        self.report.target_forward_passes += more
        self.report.resumptions += stream.resumptions
        self.report.proposed_tokens += stream.proposals[0]
        self.report.accepted_tokens += stream.proposals[1]
        stream.resumptions, stream.proposals = 0, (0, 0)
        return more

    def keep_open(self, job: int) -> None:
        """Keep the stream of a complete step open for the next step, until `take_unclaimed` is called."""
        if job in self.writers:
            self._continuable[job] = self.writers[job].stream

    def take_unclaimed(self) -> list[Stream]:
        """Take out the streams that were kept open and that no next step continues."""
        streams = list(self._continuable.values())
        self._continuable.clear()
        return streams

    def retire(self, stream: Stream, reader: asyncio.Task[None] | None = None) -> None:
        """Close a stream that no job will read again, once its last reader has ended."""

        async def close() -> None:
            if reader is not None:
                await wait_for_end({reader})
            await close_request(stream.deltas)

        stream.counts.aborted += len(stream.unread)
        stream.unread.clear()
        task = asyncio.get_running_loop().create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Abort every request and count its tokens; no job may still be reading."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        # One request may have written several undecided steps.
        streams = {writer.stream for writer in self.writers.values()} | set(self._continuable.values())
        for writer in self.writers.values():
            writer.stream.counts.aborted += len(writer.segmenter.token_ids)
        for stream in streams:
            stream.counts.aborted += len(stream.unread)
        await asyncio.gather(*(close_request(stream.deltas) for stream in streams))


def step_rules(request: ReplyRequest, settings: DecodingSettings, tokenizer: Tokenizer) -> Segmentation:
    """The rules that split a model's tokens into steps."""
    regions, sampling = request.regions, request.sampling
    if sampling.structured is not None:
        # One step, so one request: the constraint covers the whole reply, and each request would restart it.
        return Segmentation(
            delimiter=None, max_step_tokens=sampling.max_tokens, stop=sampling.stop, eos_ids=tokenizer.eos_ids
        )
    close = regions.thinking.close if regions.thinking is not None else None
    # With `answer_from_target`, the answer after the thinking is an action region.
    answer_markers = (close,) if close is not None and regions.answer_from_target else ()
    return Segmentation(
        delimiter=settings.delimiter,
        max_step_tokens=settings.max_step_tokens,
        action_markers=regions.action_markers + answer_markers,
        boundary=close,
        stop=sampling.stop,
        eos_ids=tokenizer.eos_ids,
    )
