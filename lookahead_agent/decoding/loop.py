"""The loop of Lookahead Reasoning: carries out the scheduler's actions and feeds their results back as events."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from lookahead_agent.decoding import step as steps
from lookahead_agent.decoding.accounting import EngineProgress, ReplyClock, ReplyReport, stall_limit
from lookahead_agent.decoding.draft_follower import DraftFollower
from lookahead_agent.decoding.foreign import call_part
from lookahead_agent.decoding.prefixes import Prefixes, without_surrogates
from lookahead_agent.decoding.request import DecodingSettings, OnStep, Reply, ReplyRequest, StepEvent, StepEventKind
from lookahead_agent.decoding.scheduler import LookaheadScheduler
from lookahead_agent.decoding.step import Node, Source, Step, StepEnd
from lookahead_agent.decoding.streams import StepWriter, Stream, Streams
from lookahead_agent.decoding.verifier import (
    DraftStep,
    DraftVerifier,
    EarlyVerifier,
    PartialStep,
    StepPair,
    Verdict,
    Verifier,
)
from lookahead_agent.engines.protocol import Engine, SupportsSharedDraft
from lookahead_agent.engines.shared_draft import BufferLines
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.system.background import describe, is_cancelled, is_foreign, wait_for_end

logger = logging.getLogger(__name__)

_MORE_PATIENCE = 4.0  # factor on the patience with a draft or verifier that was late, and not silent
_INSTANT = 1e-3  # seconds by which a timer may be early

SpeculationPart = Literal["draft", "verifier"]


class _SilenceError(EngineError):
    """A model or the verifier gave nothing in its time."""

    def __init__(self, part: str, seconds: float) -> None:
        super().__init__(f"{part} timed out after {seconds:g} s")


async def lookahead(
    request: ReplyRequest,
    target: Engine,
    draft: Engine | None = None,
    verifier: Verifier | DraftVerifier | None = None,
    settings: DecodingSettings | None = None,
    on_text: Callable[[str], None] | None = None,
    on_step: OnStep | None = None,
) -> Reply:
    """Generate a reply with Lookahead Reasoning; without draft or verifier, the target generates alone.

    The event loop calls `on_text` with each piece of committed text, and `on_step` with each state change of a step.
    Cancelling the task aborts every engine request that it started before it raises.

    Raises:
        EngineError: The target failed. (A failed draft or verifier only disables speculation.)
        ConfigurationError: The target's engine does not support `request`.
    """
    settings = settings or DecodingSettings()
    if draft is None or verifier is None or request.sampling.structured is not None:
        settings = replace(settings, depth=0)
    loop = _Loop(request, target, draft or target, verifier, settings, on_text, on_step)
    # The loop has a task of its own, since each event would resume every caller's coroutine too.
    return await asyncio.create_task(loop.run())


@dataclass(eq=False)
class _Loop:
    """The decoding of one reply: `run` is the algorithm, and each job is a task that posts its event to the queue."""

    request: ReplyRequest
    target: Engine
    draft: Engine
    verifier: Verifier | DraftVerifier | None
    settings: DecodingSettings
    on_text: Callable[[str], None] | None
    on_step: OnStep | None

    def __post_init__(self) -> None:
        request, target, draft, settings = self.request, self.target, self.draft, self.settings
        self._early = self.verifier if settings.early and isinstance(self.verifier, EarlyVerifier) else None
        self._report = ReplyReport()
        self._clock = ReplyClock(asyncio.get_running_loop().time)
        self._prefixes = Prefixes(request, target.tokenizer, draft.tokenizer, self.on_text)
        self._scheduler = LookaheadScheduler(
            settings.depth,
            settings.width,
            settings.hedge,
            settings.synchronous,
            draft_first=isinstance(self.verifier, DraftVerifier),
            awaits_thinking=self._prefixes.awaits_thinking,
        )
        buffer: BufferLines | None = None
        shares = (
            settings.shared_draft and draft is not target and self._prefixes.shared and not request.sampling.is_seeded
        )
        if shares and isinstance(target, SupportsSharedDraft) and target.shared_draft:
            buffer = target.draft_lines(request.prompt_ids)
        engines = {Source.TARGET: target, Source.DRAFT: draft}
        self._streams = Streams(request, settings, engines, self._prefixes, self._report, self._clock, buffer)
        self._follower = DraftFollower(draft, buffer, self._streams) if buffer is not None else None
        self._events: asyncio.Queue[steps.Event] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._verdicts: dict[int, Verdict] = {}  # verdicts on undecided draft steps, by job
        self._invalid_request: ConfigurationError | None = None
        # Why the target's engine ended the last committed step, such as "content_filter"
        self._engines_reason: str | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}  # timers that notice silence, by job
        # Without a draft first, or rounds, the target never waits for the draft.
        self._waits_for_draft = settings.synchronous or isinstance(self.verifier, DraftVerifier)
        self._patience: dict[SpeculationPart, float] = {"draft": settings.patience, "verifier": settings.patience}
        self._progress = {
            "draft": self._streams.progress[Source.DRAFT],
            "verifier": EngineProgress.of(self.verifier),
        }
        # Jobs that are late or have timed out, and since when.
        self._silent: dict[int, tuple[SpeculationPart, float]] = {}
        self._is_foreign = is_foreign(self.verifier)  # whether a user's class verifies
        self._asking: asyncio.Task[None] | None = None  # asks it whether a step is ruled out
        self._verifying: dict[int, float] = {}  # time since which the verifier is silent, by job
        self._verifier_waited = 0.0  # seconds since the last verdict, carried over from aborted jobs

    async def run(self) -> Reply:
        try:
            end = self._carry_out(self._scheduler.start())
            while end is None:
                event = await self._events.get()
                if isinstance(event, steps.StepWritten):
                    self._streams.keep_open(event.job)
                end = self._carry_out(self._scheduler.handle(event))
        finally:
            await self._close()
        self._report.seconds = self._clock.seconds()
        self._report.speculation_disabled = self._scheduler.speculation_disabled
        if (silent := self._silent.get(self._scheduler.disabled_by or 0)) is not None:
            part, since = silent
            # A part that serves other replies is busy, and not silent.
            self._report.silent = part if self._progress[part].advanced_at <= since else None
        committed = self._prefixes.committed
        return Reply(
            text=committed.finish(),
            token_ids=tuple(committed.token_ids),
            finish_reason=self._engines_reason or "length" if end is StepEnd.BUDGET else "stop",
            report=self._report,
            text_ends=tuple(committed.text_ends),
            truncated=end is not StepEnd.EOS,
        )

    def _carry_out(self, actions: list[steps.Action]) -> StepEnd | None:
        """Carry out actions; return the end of the last step once the reply is complete."""
        end: StepEnd | None = None
        for action in actions:
            match action:
                case steps.StartDraft(job, node, rank):
                    self._start(job, node, Source.DRAFT, rank, live=False)
                case steps.StartTarget(job, node, live):
                    self._start(job, node, Source.TARGET, 0, live=live)
                case steps.Verify(job, draft, target):
                    self._report.verifier_calls += 1
                    step = target.step if target is not None else None
                    self._spawn(job, partial(self._verify, job, self._streams.writers[draft.job], step))
                case steps.Commit(node):
                    self._commit(node)
                case steps.Reject(job):
                    writer = self._pop_writer(job)
                    writer.stream.counts.rejected += len(writer.segmenter.token_ids)
                    self._emit_step("rejected" if writer.stream.source is Source.DRAFT else "unused", writer)
                case steps.Abort(job):
                    self._abort(job)
                case steps.Finish(finished):
                    end = finished
                case steps.Fail(reason):
                    raise self._invalid_request or EngineError(f"the target model failed: {reason}")
        for stream in self._streams.take_unclaimed():
            self._retire(stream)
        return end

    def _start(self, job: int, node: Node, source: Source, rank: int, *, live: bool) -> None:
        awaits_thinking = self._scheduler.awaits_thinking
        try:
            writer = self._streams.start(job, node, source, rank, live=live, awaits_thinking=awaits_thinking)
            if self._follower is not None:
                self._follower.step_started(writer)
        except BaseException as error:  # the engine is foreign code
            self._events.put_nowait(self._failure(job, source, error))
            return
        self._spawn(job, partial(self._write, writer))
        now, stall = asyncio.get_running_loop().time(), self.settings.stall_timeout
        if source is Source.TARGET and stall is not None:
            length, progress = writer.stream.prompt_length, self._streams.progress[source]
            self._watch(
                job, lambda: max(now, progress.advanced_at), lambda: stall_limit(stall, length), self._fail_stalled
            )
        elif source is Source.DRAFT and self._waits_for_draft:
            streams, patience = self._streams, self._patience
            self._watch(
                job, lambda: streams.draft_silent_since, lambda: patience["draft"], partial(self._late, "draft")
            )

    def _commit(self, node: Node) -> None:
        writer = self._streams.writers.pop(node.job)
        drafted = node.source is Source.DRAFT
        self._report.steps += 1
        self._report.accepted += drafted
        self._report.closing_tokens += node.step.closing_tokens if node.step is not None else 0
        writer.stream.counts.committed += len(writer.segmenter.token_ids)
        reason = None if drafted else writer.stream.finish_reason
        self._engines_reason = None if reason in ("stop", "length") else reason
        self._emit_step("accepted" if drafted else "committed", writer)
        self._prefixes.commit(node, writer.live)

    def _abort(self, job: int) -> None:
        task = self._tasks.get(job)
        if task is not None:
            task.cancel()
        if (since := self._verifying.pop(job, None)) is not None:
            self._verifier_waited = asyncio.get_running_loop().time() - since
        if job in self._streams.writers:
            writer = self._pop_writer(job)
            if writer.complete is None and writer.stream.source is Source.DRAFT:
                self._streams.draft_aborted()
            writer.stream.counts.aborted += len(writer.segmenter.token_ids)
            self._emit_step("aborted", writer)
            self._retire(writer.stream, task)

    def _pop_writer(self, job: int) -> StepWriter:
        self._prefixes.forget(job)
        return self._streams.writers.pop(job)

    def _retire(self, stream: Stream, reader: asyncio.Task[None] | None = None) -> None:
        if self._follower is not None:
            self._follower.leave(stream)
        self._streams.retire(stream, reader)

    # Jobs

    async def _write(self, writer: StepWriter) -> steps.Event:
        source = writer.stream.source
        with self._clock.draft if source is Source.DRAFT else self._clock.target:
            try:
                async with self._streams.idle_timeout(source) as idle_timeout:
                    return await self._read_step(writer, idle_timeout)
            except TimeoutError as error:
                if not idle_timeout.expired():
                    raise
                if source is Source.DRAFT:
                    self._note_silence(writer.job, "draft", self._streams.limits[source] or 0)
                raise _SilenceError(f"the {source.value} model", self._streams.limits[source] or 0) from error

    async def _read_step(self, writer: StepWriter, idle_timeout: asyncio.Timeout) -> steps.Event:
        stream = writer.stream
        while True:
            while stream.unread:
                token = stream.unread.popleft()
                step = writer.segmenter.push(token)
                if writer.live:
                    self._prefixes.committed.commit((token,))
                if step is not None:
                    if writer.live:
                        self._prefixes.committed.commit(step.token_ids[len(writer.segmenter.token_ids) :])
                    return self._finish_step(writer, step)
                if not writer.live:
                    self._refute(writer)
            if await self._streams.read(stream, idle_timeout):
                if self._follower is not None:
                    self._follower.tokens_read(writer)
            elif stream.finish_reason is None:
                raise EngineError("the engine ended a reply without saying why")
            else:
                return self._finish_step(writer, writer.segmenter.close(stream.finish_reason))

    def _finish_step(self, writer: StepWriter, step: Step) -> steps.StepWritten:
        if self._follower is not None:
            self._follower.step_ended(writer)
        if drafted := writer.stream.source is Source.DRAFT:
            self._streams.draft_waited = 0.0
        writer.complete = self._prefixes.from_draft(writer.job, writer.node, step) if drafted else step
        writer.ended = asyncio.get_running_loop().time()
        self._emit_step("drafted" if drafted else "written", writer)
        self._refute(writer)
        return steps.StepWritten(writer.job, writer.complete)

    def _refute(self, writer: StepWriter) -> None:
        """Report draft steps of a node that the target's unfinished step already rules out."""
        node = writer.node
        if self._early is None or node.target_job is None or not node.candidates:
            return
        target = self._streams.writers.get(node.target_job)
        if target is None or target.complete or not target.segmenter.token_ids:
            return
        target_so_far: PartialStep | None = None
        for candidate in node.candidates:
            draft = self._streams.writers.get(candidate.job)
            if draft is None or not draft.segmenter.token_ids or candidate.rank in target.refuted:
                continue
            target_so_far = target_so_far or self._partial(target)
            if self._early is None:
                return
            if self._is_foreign:
                if self._asking is None or self._asking.done():
                    ask = self._ask_early(self._early, self._partial(draft), target_so_far, target, candidate.rank)
                    self._asking = asyncio.get_running_loop().create_task(ask)
            elif self._refutes(self._early, self._partial(draft), target_so_far):
                self._record_refutation(target, candidate.rank)

    def _refutes(self, verifier: EarlyVerifier, draft: PartialStep, target: PartialStep) -> bool:
        """Ask a verifier, whose error must not fail the model's job that asks: the answer only saves work."""
        try:
            return bool(verifier.refutes(draft, target))
        except BaseException as error:
            self._early = None
            logger.warning("the verifier cannot rule out steps early: %s", describe(error))
            return False

    async def _ask_early(
        self, verifier: EarlyVerifier, draft: PartialStep, so_far: PartialStep, target: StepWriter, rank: int
    ) -> None:
        """Ask a user's verifier about a pair, one at a time: it may take longer than the next token."""

        draft, so_far = (replace(part, token_ids=tuple(part.token_ids)) for part in (draft, so_far))

        async def refutes() -> bool:
            return self._refutes(verifier, draft, so_far)

        if (
            await call_part(verifier, refutes)
            and target.job in self._streams.writers
            and not target.complete
            and rank not in target.refuted
        ):
            self._record_refutation(target, rank)

    def _record_refutation(self, target: StepWriter, rank: int) -> None:
        target.refuted |= {rank}
        self._report.refuted += 1
        self._events.put_nowait(steps.Refuted(target.job, rank))

    def _partial(self, writer: StepWriter) -> PartialStep:
        if writer.complete is not None:
            return PartialStep(writer.complete.token_ids, writer.complete.text, True)
        in_target_ids = writer.stream.source is Source.TARGET or self._prefixes.shared
        return PartialStep(writer.segmenter.token_ids if in_target_ids else (), writer.segmenter.text, False)

    async def _verify(self, job: int, writer: StepWriter, target: Step | None) -> steps.Event:
        loop, limit = asyncio.get_running_loop(), self.settings.verifier_timeout
        started = loop.time()
        node, draft = writer.node, writer.complete
        assert draft is not None
        question, before, salt = self.request.question, self._prefixes.text(node), self.request.sampling.cache_salt
        verify: Callable[[], Awaitable[Verdict]]
        if isinstance(self.verifier, DraftVerifier):
            prefix = tuple(self._prefixes.ids(node, Source.TARGET))
            verify = partial(self.verifier.verify_draft, DraftStep(question, before, draft, prefix, salt))
        else:
            assert self.verifier is not None
            assert target is not None
            verify = partial(self.verifier.verify, StepPair(question, before, draft, target, node.position, salt))
        since = self._verifying[job] = loop.time() - self._verifier_waited
        self._watch(job, lambda: since, lambda: self._patience["verifier"], partial(self._late, "verifier"))
        with self._clock.verifier:
            try:
                async with asyncio.timeout(limit) as timeout:
                    verdict = await (call_part(self.verifier, verify) if self._is_foreign else verify())
            except TimeoutError as error:
                if not timeout.expired():
                    raise
                self._note_silence(job, "verifier", limit)
                raise _SilenceError("the verifier", limit) from error
        self._verifying.pop(job, None)
        self._verifier_waited = 0.0
        self._progress["verifier"].advanced_at = loop.time()
        if verdict.score is not None and math.isnan(verdict.score):
            raise EngineError("the verifier's score is not a number")
        self._report.judge_calls += verdict.judge_calls
        self._verdicts[writer.job] = verdict
        self._emit("judged", writer, started, loop.time(), verdict)
        logger.debug("%s: %r for %r", verdict, writer.complete, target)
        return steps.Judged(job, bool(verdict.accepted))

    def _spawn(self, job: int, work: Callable[[], Coroutine[Any, Any, steps.Event]]) -> None:
        task = self._tasks[job] = asyncio.get_running_loop().create_task(self._run_job(job, work))
        task.add_done_callback(lambda _: self._job_ended(job))

    def _job_ended(self, job: int) -> None:
        self._tasks.pop(job, None)
        if (timer := self._timers.pop(job, None)) is not None:
            timer.cancel()

    def _watch(
        self, job: int, since: Callable[[], float], limit: Callable[[], float], silent: Callable[[int, float], None]
    ) -> None:
        """Call `silent` with the job and its silence in seconds, once nothing has come from it for as long as `limit`.

        One timer per limit and not one per token, which would cost more than the token.
        """
        loop = asyncio.get_running_loop()

        def check() -> None:
            silence = loop.time() - since()
            if silence < limit() - _INSTANT:
                self._timers[job] = loop.call_later(limit() - silence, check)
            else:
                silent(job, silence)

        self._timers[job] = loop.call_later(max(0.0, limit() - (loop.time() - since())), check)

    def _late(self, part: SpeculationPart, job: int, silence: float) -> None:
        self._note_silence(job, part, silence)
        who = "the draft model" if part == "draft" else "the verifier"
        self._events.put_nowait(steps.Late(job, str(_SilenceError(who, round(silence, 1)))))

    def _note_silence(self, job: int, part: SpeculationPart, seconds: float) -> None:
        self._silent[job] = part, asyncio.get_running_loop().time() - seconds

    def _fail_stalled(self, job: int, silence: float) -> None:
        self._events.put_nowait(steps.Failed(job, str(_SilenceError("the target model", round(silence)))))

    async def _run_job(self, job: int, work: Callable[[], Coroutine[Any, Any, steps.Event]]) -> None:
        try:
            event = await work()
            if (silent := self._silent.pop(job, None)) is not None:
                self._patience[silent[0]] *= _MORE_PATIENCE
        except BaseException as error:
            # Foreign code may raise what ends a loop or a program, and CancelledError without being cancelled.
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            writer = self._streams.writers.get(job)
            event = self._failure(job, writer.stream.source if writer is not None else None, error)
        self._events.put_nowait(event)

    def _failure(self, job: int, source: Source | None, error: BaseException) -> steps.Failed:
        logger.debug("job %d failed", job, exc_info=error)
        if isinstance(error, ConfigurationError) and source is Source.TARGET:
            self._invalid_request = error
        return steps.Failed(job, describe(error))

    def _emit_step(self, kind: StepEventKind, writer: StepWriter) -> None:
        verdict = self._verdicts.pop(writer.job, None) if kind not in ("drafted", "written") else None
        ended = writer.ended if writer.complete is not None else asyncio.get_running_loop().time()
        self._emit(kind, writer, writer.started, ended, verdict)

    def _emit(
        self, kind: StepEventKind, writer: StepWriter, started: float, ended: float, verdict: Verdict | None
    ) -> None:
        if self.on_step is not None:
            text = without_surrogates((writer.complete or writer.segmenter).text)
            reason, score = (verdict.reason, verdict.score) if verdict is not None else (None, None)
            source, position, began = writer.stream.source, writer.node.position, self._clock.began
            self.on_step(StepEvent(kind, source.value, position, text, started - began, ended - began, reason, score))

    async def _close(self) -> None:
        cleaning = asyncio.get_running_loop().create_task(self._clean())
        try:
            await asyncio.shield(cleaning)
        except asyncio.CancelledError:  # cancelled again: abort the engine requests first
            await cleaning
            raise

    async def _clean(self) -> None:
        """Cancel every job, abort every engine request and count their tokens."""
        tasks = [*self._tasks.values(), *([self._asking] if self._asking is not None else [])]
        for task in tasks:
            task.cancel()
        await wait_for_end(tasks)
        if self._follower is not None:
            await self._follower.close()
        try:
            for writer in self._streams.writers.values():
                self._emit_step("aborted", writer)
        finally:
            await self._streams.close()
