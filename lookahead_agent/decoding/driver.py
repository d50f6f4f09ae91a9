"""Runs the machine's decisions on engines and a verifier: one asyncio task per job, one queue of events."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from lookahead_agent.decoding.accounting import BusyClock, ReplyReport, TokenCounts
from lookahead_agent.decoding.draft_follower import DraftFollower
from lookahead_agent.decoding.events import (
    Abort,
    Action,
    Commit,
    Event,
    Fail,
    Failed,
    Finish,
    Judged,
    Refuted,
    Reject,
    StartDraft,
    StartTarget,
    StepWritten,
    Verify,
)
from lookahead_agent.decoding.idle_timeout import IdleTimeout
from lookahead_agent.decoding.output import ReplyText, encodable
from lookahead_agent.decoding.regions import PROMPT_TAIL
from lookahead_agent.decoding.request import DecodingSettings, Reply, ReplyRequest
from lookahead_agent.decoding.scheduler import LookaheadScheduler
from lookahead_agent.decoding.segmenter import PrefixContext, Segmentation, Segmenter
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.step_events import OnStep, StepEvent, StepEventKind
from lookahead_agent.decoding.tree import Node, Source
from lookahead_agent.decoding.verifier import (
    DraftStep,
    DraftVerifier,
    EarlyVerifier,
    PartialStep,
    StepPair,
    Verdict,
    Verifier,
)
from lookahead_agent.decoding.vocabulary import Vocabularies
from lookahead_agent.decoding.writing import Stream, WriteJob
from lookahead_agent.engines.protocol import DraftLines, Engine, Sampling, SupportsSharedDraft
from lookahead_agent.errors import ConfigurationError, EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def lookahead(
    request: ReplyRequest,
    target: Engine,
    draft: Engine | None = None,
    verifier: Verifier | DraftVerifier | None = None,
    settings: DecodingSettings | None = None,
    on_text: Callable[[str], None] | None = None,
    on_step: OnStep | None = None,
) -> Reply:
    """Write a reply with Lookahead Reasoning (arXiv 2506.19830, section 3.1).

    Args:
        request: What to reply to.
        target: The engine whose quality the reply has.
        draft: The engine that thinks ahead. None: the target alone.
        verifier: Decides which draft steps are kept. None: only the target's are, which then guesses tokens by what
            the draft writes if they share a draft.
        settings: How far to look ahead.
        on_text: Called in the event loop with each piece of text as soon as it is certain.
        on_step: Called in the event loop with what happens to each step.

    Raises:
        EngineError: The target failed. (A failed draft or verifier only ends the speculation.)
        ConfigurationError: The target's engine cannot do what `request` asks of it.

    Cancelling the task aborts every engine request that it started before the cancellation is raised.
    """
    settings = settings or DecodingSettings()
    if draft is None or verifier is None or request.sampling.structured is not None:
        settings = replace(settings, depth=0)
    driver = _Driver(request, target, draft or target, verifier, settings, on_text or (lambda _: None), on_step)
    return await driver.run()


class _Driver:
    def __init__(
        self,
        request: ReplyRequest,
        target: Engine,
        draft: Engine,
        verifier: Verifier | DraftVerifier | None,
        settings: DecodingSettings,
        on_text: Callable[[str], None],
        on_step: OnStep | None,
    ) -> None:
        self._request = request
        self._on_step = on_step
        self._engines = {Source.TARGET: target, Source.DRAFT: draft}
        self._verifier = verifier
        self._early = verifier if settings.early and isinstance(verifier, EarlyVerifier) else None
        self._settings = settings
        self._rules = {source: self._segmentation(engine) for source, engine in self._engines.items()}
        self._scheduler = LookaheadScheduler(
            settings.depth,
            settings.width,
            settings.hedge,
            settings.synchronous,
            draft_first=isinstance(verifier, DraftVerifier),
            awaits_thinking=request.regions.begins_outside_thinking(
                target.tokenizer.decode(request.prompt_ids[-PROMPT_TAIL:])
            ),
        )
        beginning = request.regions.at_beginning(target.tokenizer.decode(request.prompt_ids[-PROMPT_TAIL:]))
        self._text = ReplyText(target.tokenizer, request.prompt_ids, request.sampling.stop, on_text, beginning)
        self._vocabularies = Vocabularies(target.tokenizer, draft.tokenizer)
        self._draft_reply: list[int] = []  # what is committed, in the draft's vocabulary if that is another
        self._draft_ids: dict[int, tuple[int, ...]] = {}  # the same of steps that are not, by job
        # What later steps must know of the text: up to the front, and up to steps that are not decided, by job.
        thinking = request.regions.thinking
        marker = len(thinking.open) if thinking is not None else 0
        room = max(marker, *(rules.lookback for rules in self._rules.values()))
        self._before = PrefixContext(room, thinking=beginning)
        self._befores: dict[int, PrefixContext] = {}
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._verdicts: dict[int, Verdict] = {}  # of draft steps that are not decided, by job
        self._refused_request: ConfigurationError | None = None
        self._report = ReplyReport()
        any_work = BusyClock(self._loop.time)
        self._busy = {name: BusyClock(self._loop.time, any_work) for name in ("draft", "target", "verifier")}
        self._busy["any"] = any_work
        self._first: float | None = None  # when the target had read the prompt
        # It goes on from one request to the next: the target may finish each step before the draft does.
        self._draft_idle_timeout = IdleTimeout(settings.draft_timeout, "the draft model")
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writing: dict[int, WriteJob] = {}
        self._closing: set[asyncio.Task[None]] = set()
        # The stream of the job whose step was just written, for the job that writes the step after it.
        self._open: dict[int, Stream] = {}
        self._draft_lines = self._draft_lines_of(target, draft)
        self._draft_follower: DraftFollower | None = None
        self._followed: Stream | None = None  # which of the target's streams the shadow follows
        if self._draft_lines is not None:
            self._draft_follower = DraftFollower(
                draft,
                self._draft_lines,
                replace(request.sampling, stop=(), structured=None),
                self._report.draft_tokens,
                self._busy[Source.DRAFT.value],
                min(len(request.prompt_ids) + request.sampling.max_tokens, draft.context_length),
            )

    def _draft_lines_of(self, target: Engine, draft: Engine) -> DraftLines | None:
        """Where a target with a shared draft finds its guesses; None if it gets none.

        A seed fixes a sampled reply, and guesses, which come when they come, change which random numbers it takes.
        """
        seeded = self._request.sampling.seeded
        if not self._settings.shared_draft or seeded or draft is target or not self._vocabularies.shared:
            return None
        if not isinstance(target, SupportsSharedDraft) or not target.shared_draft:
            return None
        return target.draft_lines(self._request.prompt_ids)

    def _segmentation(self, engine: Engine) -> Segmentation:
        regions, sampling = self._request.regions, self._request.sampling
        if sampling.structured is not None:
            # One step, and so one request: the constraint is on the reply, and every request begins it anew.
            return Segmentation(
                delimiter=None,
                max_step_tokens=sampling.max_tokens,
                stop=sampling.stop,
                eos_ids=engine.tokenizer.eos_ids,
            )
        return Segmentation(
            delimiter=self._settings.delimiter,
            max_step_tokens=self._settings.max_step_tokens,
            step_tokens=self._settings.step_tokens,
            # Past its thinking, a reply that must answer for itself is an action.
            action_markers=regions.action_markers
            + ((regions.thinking.close,) if regions.thinking and regions.answer_from_target else ()),
            boundary=regions.thinking.close if regions.thinking else None,
            stop=sampling.stop,
            eos_ids=engine.tokenizer.eos_ids,
        )

    async def run(self) -> Reply:
        try:
            end = self._carry_out(self._scheduler.start())
            while end is None:
                event = await self._events.get()
                if isinstance(event, StepWritten) and event.job in self._writing:
                    self._open[event.job] = self._writing[event.job].stream
                end = self._carry_out(self._scheduler.handle(event))
        finally:
            await self._close_everything()
        total = self._now()
        seconds = {name: clock.seconds for name, clock in self._busy.items()}
        waiting = max(0.0, total - seconds.pop("any"))
        first = total if self._first is None else self._first
        self._report.seconds = {"total": total, "first": first, "waiting": waiting} | seconds
        self._report.speculation_disabled = self._scheduler.speculation_disabled
        return Reply(
            text=self._text.finish(),
            token_ids=tuple(self._text.token_ids),
            finish_reason="length" if end is StepEnd.BUDGET else "stop",
            report=self._report,
            text_ends=tuple(self._text.text_ends),
            cut=end is not StepEnd.EOS,
        )

    def _carry_out(self, actions: list[Action]) -> StepEnd | None:
        end: StepEnd | None = None
        for action in actions:
            match action:
                case StartDraft(job, node, rank):
                    self._start_writing(job, node, Source.DRAFT, rank, live=False)
                case StartTarget(job, node, live):
                    self._start_writing(job, node, Source.TARGET, 0, live)
                case Verify(job, draft, target):
                    self._report.verifier_calls += 1
                    self._spawn(job, partial(self._verify, job, draft, target))
                case Commit(node):
                    self._commit(node)
                case Reject(job):
                    written = self._writing.pop(job)
                    self._token_counts(written.stream).rejected += written.generated
                    self._forget(job)
                    self._tell("rejected" if written.stream.source is Source.DRAFT else "unused", job, written)
                case Abort(job):
                    self._abort(job)
                case Finish(finished):
                    end = finished
                case Fail(reason):
                    if self._refused_request is not None:
                        raise self._refused_request
                    raise EngineError(f"the target model failed: {reason}")
        for stream in self._open.values():  # the machine does not want the step after this one
            self._retire(stream)
        self._open.clear()
        return end

    def _commit(self, node: Node) -> None:
        assert node.step is not None
        written = self._writing.pop(node.job)
        self._report.steps += 1
        self._report.accepted += node.source is Source.DRAFT
        self._token_counts(written.stream).committed += written.generated
        self._tell("accepted" if node.source is Source.DRAFT else "committed", node.job, written)
        if not self._vocabularies.shared:
            self._draft_reply.extend(self._ids_for_draft(node))
        self._before = self._befores.get(node.job) or self._before.then(node.step.text)
        self._forget(node.job)
        if not written.live:
            self._text.commit(node.step.token_ids)

    def _abort(self, job: int) -> None:
        task = self._tasks.get(job)
        if task is not None:
            task.cancel()
        if (written := self._writing.pop(job, None)) is not None:
            self._token_counts(written.stream).aborted += written.generated
            self._forget(job)
            self._tell("aborted", job, written)
            self._retire(written.stream, task)

    def _forget(self, job: int) -> None:
        """A step is decided: nothing is written after it that begins in the middle of a reply."""
        self._draft_ids.pop(job, None)
        self._befores.pop(job, None)

    def _retire(self, stream: Stream, reader: asyncio.Task[None] | None = None) -> None:
        """Close a stream that nobody will read on, once the job that reads it has ended."""

        async def close() -> None:
            if reader is not None:
                await asyncio.wait({reader})
            await stream.close()

        if stream is self._followed:
            self._leave_follower()
        self._token_counts(stream).aborted += len(stream.unread)
        stream.unread.clear()
        task = self._loop.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _token_counts(self, stream: Stream) -> TokenCounts:
        drafted = stream.source is Source.DRAFT
        return self._report.draft_tokens if drafted else self._report.target_tokens

    # Writing

    def _start_writing(self, job: int, node: Node, source: Source, rank: int, live: bool) -> None:
        engine = self._engines[source]
        budget = self._request.sampling.max_tokens - self._length_until(node, source)
        sampling = self._sampling(node, source, rank)
        stream = self._open.get(node.job)
        if stream is not None and stream.source is source and stream.sampling == sampling:
            del self._open[node.job]
        else:
            prompt = [*self._prompt(source), *self._reply_until(node, source)]
            deltas = engine.generate(prompt, replace(sampling, max_tokens=max(1, budget)))
            draft_line = (
                self._draft_lines.begin(prompt) if self._draft_lines is not None and source is Source.DRAFT else None
            )
            stream = Stream(source, sampling, deltas, engine.tokenizer.stream(prompt), draft_line)
        rules = self._rules[source]
        if self._scheduler.awaits_thinking and self._request.regions.thinking is not None:
            rules = replace(rules, thinking_marker=self._request.regions.thinking.open)
        segmenter = Segmenter(rules, stream.text, self._before_of(node), budget)
        written = WriteJob(node, stream, segmenter, live, self._now())
        self._writing[job] = written
        if live and stream is not self._followed:
            self._follower_follows(written)
        self._spawn(job, partial(self._write, job, written))

    def _prompt(self, source: Source) -> tuple[int, ...]:
        request = self._request
        if source is Source.TARGET or self._vocabularies.shared or request.draft_prompt_ids is None:
            return request.prompt_ids
        return request.draft_prompt_ids

    def _sampling(self, node: Node, source: Source, rank: int) -> Sampling:
        """How the step after a node is sampled.

        Two steps that are sampled alike may be written by one engine request. Seeded ones never are: a step's random
        numbers must not depend on which request wrote it. The draft's first candidate has the target's random numbers
        at each position, which makes the two agree more often.
        """
        sampling = replace(self._request.sampling, stop=())
        if sampling.temperature == 0:
            if source is Source.TARGET or rank == 0:
                return replace(sampling, seed=None)
            sampling = replace(sampling, temperature=self._settings.draft_temperature, seed=sampling.seed or 0)
        if sampling.seed is None:
            return sampling
        digest = hashlib.sha256(f"{sampling.seed}:{node.position}:{rank}".encode()).digest()
        return replace(sampling, seed=int.from_bytes(digest[:4]))

    def _reply_until(self, node: Node, source: Source = Source.TARGET) -> list[int]:
        """The reply's tokens up to `node`, in the vocabulary of one of the models: a copy, as long as the reply."""
        ids = [*self._committed(source)]
        for walk in self._undecided(node):
            ids.extend(self._ids_of(walk, source))
        return ids

    def _length_until(self, node: Node, source: Source = Source.TARGET) -> int:
        """How many tokens those are."""
        undecided = sum(len(self._ids_of(walk, source)) for walk in self._undecided(node))
        return len(self._committed(source)) + undecided

    def _text_until(self, node: Node) -> str:
        """The reply's text up to `node`."""
        return self._text.text + "".join(walk.step.text for walk in self._undecided(node) if walk.step is not None)

    def _before_of(self, node: Node) -> PrefixContext:
        """What a step after `node` must know of the text before it."""
        if node is self._scheduler.front or node.parent is None or node.step is None:
            return self._before
        if node.job not in self._befores:
            self._befores[node.job] = self._before_of(node.parent).then(node.step.text)
        return self._befores[node.job]

    def _committed(self, source: Source) -> list[int]:
        """The committed tokens, in the vocabulary of one of the models."""
        return self._draft_reply if self._is_translated(source) else self._text.token_ids

    def _ids_of(self, node: Node, source: Source) -> Sequence[int]:
        """The tokens of a node's last step, in the vocabulary of one of the models."""
        assert node.step is not None
        return self._ids_for_draft(node) if self._is_translated(source) else node.step.token_ids

    def _is_translated(self, source: Source) -> bool:
        """Whether a model has another vocabulary than the reply."""
        return source is Source.DRAFT and not self._vocabularies.shared

    def _undecided(self, node: Node) -> list[Node]:
        """The nodes after the front down to `node`."""
        nodes: list[Node] = []
        walk: Node | None = node
        while walk is not None and walk is not self._scheduler.front:
            nodes.append(walk)
            walk = walk.parent
        return nodes[::-1]

    def _ids_for_draft(self, node: Node) -> tuple[int, ...]:
        """The draft's tokens of a node's last step; of its own steps they are those that it wrote."""
        assert node.step is not None
        if node.job not in self._draft_ids:
            self._draft_ids[node.job] = self._vocabularies.to_draft(node.step)
        return self._draft_ids[node.job]

    async def _write(self, job: int, written: WriteJob) -> Event:
        stream = written.stream
        with self._busy[stream.source.value]:
            while True:
                while stream.unread:
                    token = stream.unread.popleft()
                    step = written.segmenter.push(token)
                    if written.live:
                        self._text.commit((token,))
                    if step is not None:
                        return self._written(job, written, step)
                    self._look_for_refutation(written)
                if await self._read(stream):
                    self._show_follower(written)
                else:
                    if stream.finish_reason is None:
                        raise EngineError("the engine ended a reply without saying why")
                    return self._written(job, written, written.segmenter.close(stream.finish_reason))

    def _written(self, job: int, written: WriteJob, step: Step) -> StepWritten:
        if written.stream is self._followed and not written.live:
            self._leave_follower()  # the draft has the next step to write
        if written.stream.source is Source.DRAFT:
            self._draft_ids[job] = step.token_ids
            left = self._request.sampling.max_tokens - self._length_until(written.node)
            step = self._vocabularies.from_draft(step, left)
        written.complete = step
        written.ended = self._now()
        self._tell("drafted" if written.stream.source is Source.DRAFT else "written", job, written)
        self._look_for_refutation(written)
        return StepWritten(job, step)

    async def _read(self, stream: Stream) -> bool:
        """Wait for more tokens of a stream, but not forever.

        Raises:
            EngineError: The engine wrote nothing for too long.
        """
        if stream.source is Source.DRAFT:
            return await self._draft_idle_timeout.until(stream.read())
        more = await self._within(self._settings.target_timeout, "the target model", stream.read())
        if self._first is None:
            self._first = self._now()
        self._report.target_forward_passes += more
        return more

    async def _within(self, limit: float | None, who: str, work: Coroutine[Any, Any, T]) -> T:
        if limit is None:
            return await work
        try:
            async with asyncio.timeout(limit):
                return await work
        except TimeoutError as error:
            raise EngineError(f"{who} gave no sign of life for {limit:g} s") from error

    # Guessing

    def _show_follower(self, written: WriteJob) -> None:
        """Have the shadow follow what a target stream has just brought."""
        stream = written.stream
        if self._draft_follower is None or stream.source is Source.DRAFT:
            return
        if stream is self._followed:
            self._draft_follower.follow(stream.unread)
        elif written.node is self._scheduler.front and self._has_left_draft(written):
            self._follower_follows(written)

    def _has_left_draft(self, written: WriteJob) -> bool:
        """Whether the draft's candidate for a step cannot tell the target any more what follows."""
        candidates = written.node.open_candidates
        if written.live or not candidates:
            return True
        candidate = candidates[0]
        draft = self._writing.get(candidate.node.job if candidate.node is not None else candidate.job or 0)
        if draft is None:
            return True
        mine, drafts = [*written.segmenter.token_ids, *written.stream.unread], draft.segmenter.token_ids
        both = min(len(mine), len(drafts))
        if any(mine[index] != drafts[index] for index in range(written.as_drafted, both)):
            return True
        written.as_drafted = both
        return False

    def _follower_follows(self, written: WriteJob) -> None:
        """Have the shadow follow a step of the target from where it is."""
        if self._draft_follower is None or self._draft_follower.failure is not None:
            return
        stream = written.stream
        self._followed = stream
        reply = self._reply_until(written.node)
        self._draft_follower.begin([*self._request.prompt_ids, *reply, *written.segmenter.token_ids, *stream.unread])

    def _leave_follower(self) -> None:
        self._followed = None
        if self._draft_follower is not None:
            self._draft_follower.leave()

    # Verifying

    def _look_for_refutation(self, written: WriteJob) -> None:
        """See whether the target's step, as far as it is written, rules out a draft step from the same node."""
        node = written.node
        target = self._writing.get(node.target_job or 0)
        if self._early is None or node.target_job is None or target is None or target.complete or not target.generated:
            return
        targets: PartialStep | None = None
        for candidate in node.open_candidates:
            draft = self._writing.get(candidate.node.job if candidate.node is not None else candidate.job or 0)
            if draft is None or not draft.generated or candidate.rank in target.refuted:
                continue
            targets = targets or self._so_far(target)
            if self._early.refutes(self._so_far(draft), targets):
                target.refuted |= {candidate.rank}
                self._report.refuted += 1
                self._events.put_nowait(Refuted(node.target_job, candidate.rank))

    def _so_far(self, written: WriteJob) -> PartialStep:
        if written.complete is not None:
            return PartialStep(written.complete.token_ids, written.complete.text, True)
        readable = written.stream.source is Source.TARGET or self._vocabularies.shared
        return PartialStep(written.segmenter.token_ids if readable else (), written.segmenter.text, False)

    async def _verify(self, job: int, draft: Node, target: Node | None) -> Event:
        assert draft.step is not None
        assert draft.parent is not None
        started = self._now()
        with self._busy["verifier"]:
            work = self._verdict(draft.parent, draft.step, target.step if target is not None else None)
            verdict = await self._within(self._settings.verifier_timeout, "the verifier", work)
        if verdict.score is not None and math.isnan(verdict.score):
            raise EngineError("the verifier's score is not a number")
        self._report.judge_calls += verdict.judge_calls
        self._verdicts[draft.job] = verdict
        self._emit("judged", Source.DRAFT, draft.position - 1, draft.step.text, started, self._now(), verdict)
        logger.debug("%s: %r for %r", verdict, draft.step.text, target.step.text if target and target.step else None)
        return Judged(job, verdict.accepted)

    async def _verdict(self, node: Node, draft: Step, target: Step | None) -> Verdict:
        question, before = self._request.question, self._text_until(node)
        if isinstance(self._verifier, DraftVerifier):
            prefix = (*self._request.prompt_ids, *self._reply_until(node))
            return await self._verifier.verify_draft(DraftStep(question, before, draft, prefix))
        assert self._verifier is not None
        assert target is not None
        return await self._verifier.verify(StepPair(question, before, draft, target, node.position))

    # Those who watch

    def _now(self) -> float:
        """Seconds since the reply began."""
        return self._loop.time() - self._started

    def _tell(self, kind: StepEventKind, job: int, written: WriteJob) -> None:
        decided = kind not in ("drafted", "written")
        verdict = self._verdicts.pop(job, None) if decided else None
        source, position, step = written.stream.source, written.node.position, written.complete
        if step is not None:
            self._emit(kind, source, position, step.text, written.started, written.ended, verdict)
        else:
            self._emit(kind, source, position, written.segmenter.text, written.started, self._now(), verdict)

    def _emit(
        self,
        kind: StepEventKind,
        source: Source,
        position: int,
        text: str,
        started: float,
        ended: float,
        verdict: Verdict | None,
    ) -> None:
        if self._on_step is None:
            return
        reason, score = (verdict.reason, verdict.score) if verdict is not None else (None, None)
        self._on_step(StepEvent(kind, source.value, position, encodable(text), started, ended, reason, score))

    # Tasks

    def _spawn(self, job: int, work: Callable[[], Coroutine[Any, Any, Event]]) -> None:
        task = self._tasks[job] = self._loop.create_task(self._run_job(job, work))
        task.add_done_callback(lambda _: self._tasks.pop(job, None))

    async def _run_job(self, job: int, work: Callable[[], Coroutine[Any, Any, Event]]) -> None:
        try:
            event = await work()
        except Exception as error:
            logger.debug("job %d failed", job, exc_info=True)
            if isinstance(error, ConfigurationError) and self._is_targets(job):
                self._refused_request = error
            event = Failed(job, str(error) or type(error).__name__)
        self._events.put_nowait(event)

    def _is_targets(self, job: int) -> bool:
        return job in self._writing and self._writing[job].stream.source is Source.TARGET

    async def _close_everything(self) -> None:
        cleaning = self._loop.create_task(self._clean())
        try:
            await asyncio.shield(cleaning)
        except asyncio.CancelledError:  # cancelled again: the engine's requests must still be aborted first
            await cleaning
            raise

    async def _clean(self) -> None:
        """End every job and every engine request, and count what they had written."""
        self._draft_idle_timeout.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._closing, return_exceptions=True)
        if self._draft_follower is not None:
            await self._draft_follower.close()
        if self._draft_lines is not None:
            self._draft_lines.close()
        # One request may have written several steps that are not decided.
        streams = {written.stream for written in self._writing.values()} | set(self._open.values())
        for job, written in self._writing.items():
            self._token_counts(written.stream).aborted += written.generated
            self._tell("aborted", job, written)
        for stream in streams:
            self._token_counts(stream).aborted += len(stream.unread)
        for result in await asyncio.gather(*(stream.close() for stream in streams), return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("closing an engine request failed: %s", result)
