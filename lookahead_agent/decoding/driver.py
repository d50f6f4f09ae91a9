"""Runs the machine's decisions on engines and a verifier: one asyncio task per job, one queue of events."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lookahead_agent.decoding.accounting import BusyClock, ReplyReport, TokenFates
from lookahead_agent.decoding.machine import (
    Abort,
    Action,
    Commit,
    Event,
    Fail,
    Failed,
    Finish,
    Judged,
    LookaheadMachine,
    Node,
    Refuted,
    Reject,
    Source,
    StartDraft,
    StartTarget,
    StepWritten,
    Verify,
)
from lookahead_agent.decoding.output import ReplyText
from lookahead_agent.decoding.segmenter import Segmentation, Segmenter
from lookahead_agent.engines.protocol import Delta, Engine, Sampling
from lookahead_agent.engines.tokenizer import TextStream
from lookahead_agent.errors import EngineError
from lookahead_agent.step import Step, StepEnd
from lookahead_agent.verifiers.protocol import EarlyVerifier, StepPair, Verifier, Writing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodingSettings:
    """How far and how to look ahead.

    Attributes:
        depth: Steps in flight at the front (γ); 0 runs the target alone.
        delimiter: Text that ends a step.
        max_step_tokens: Length limit of one step in tokens; a step cut there is never accepted.
        hedge: Whether the target goes on after its own step while the verifier thinks.
        synchronous: Whether to work in rounds (the paper's simpler variant).
        early: Whether a draft step is dropped as soon as the verifier is certain to reject it.
        verifier_timeout: Seconds after which a verifier that does not answer turns speculation off.
    """

    depth: int = 4
    delimiter: str = "\n\n"
    max_step_tokens: int = 256
    hedge: bool = True
    synchronous: bool = False
    early: bool = True
    verifier_timeout: float = 60.0


@dataclass(frozen=True)
class ReplyRequest:
    """What to reply to.

    Attributes:
        prompt_ids: Token ids of the whole prompt, shape (n,).
        sampling: Sampling parameters; `max_tokens` is the budget of the reply, `stop` its stop strings.
        question: The text that the reply answers, for verifiers that want to know.
        action_markers: Texts that open an action region.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    question: str = ""
    action_markers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reply:
    """A complete reply.

    Attributes:
        text: Its text, without stop string and end-of-sequence.
        token_ids: Its tokens, with those of a stop string and the end-of-sequence.
        finish_reason: "stop" or "length".
        report: Its figures.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: ReplyReport


async def lookahead(
    request: ReplyRequest,
    target: Engine,
    draft: Engine | None = None,
    verifier: Verifier | None = None,
    settings: DecodingSettings | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Reply:
    """Write a reply with Lookahead Reasoning (arXiv 2506.19830, section 3.1).

    Args:
        request: What to reply to.
        target: The engine whose quality the reply has.
        draft: The engine that thinks ahead; it has the target's vocabulary. None: the target alone.
        verifier: Decides which draft steps are kept. None: the target alone.
        settings: How far to look ahead.
        on_text: Called in the event loop with each piece of text as soon as it is certain.

    Raises:
        EngineError: The target failed. (A failed draft or verifier only ends the speculation.)

    Cancelling the task aborts every engine request that it started before the cancellation is raised.
    """
    settings = settings or DecodingSettings()
    if draft is None or verifier is None:
        settings = replace(settings, depth=0)
    return await _Driver(request, target, draft, verifier, settings, on_text or (lambda _: None)).run()


class _Stream:
    """One engine request. It may write several steps, one job after another, and is closed once."""

    def __init__(self, source: Source, deltas: AsyncGenerator[Delta, None], text: TextStream) -> None:
        self.source = source
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
class _WriteJob:
    """A step that is being written, or was; if `live`, its tokens are certain as they come."""

    node: Node
    stream: _Stream
    segmenter: Segmenter
    live: bool
    complete: bool = False
    refuted: bool = False

    @property
    def generated(self) -> int:
        return len(self.segmenter.token_ids)

    @property
    def so_far(self) -> Writing:
        return Writing(self.segmenter.token_ids, self.segmenter.text, self.complete)


class _Driver:
    def __init__(
        self,
        request: ReplyRequest,
        target: Engine,
        draft: Engine | None,
        verifier: Verifier | None,
        settings: DecodingSettings,
        on_text: Callable[[str], None],
    ) -> None:
        self._request = request
        self._target = target
        self._draft = draft
        self._verifier = verifier
        self._early = verifier if settings.early and isinstance(verifier, EarlyVerifier) else None
        self._settings = settings
        self._rules = Segmentation(
            delimiter=settings.delimiter,
            max_step_tokens=settings.max_step_tokens,
            action_markers=request.action_markers,
            stop=request.sampling.stop,
            eos_ids=target.tokenizer.eos_ids,
        )
        self._machine = LookaheadMachine(settings.depth, settings.hedge, settings.synchronous)
        self._text = ReplyText(target.tokenizer, request.prompt_ids, request.sampling.stop, on_text)
        self._loop = asyncio.get_running_loop()
        self._report = ReplyReport()
        self._busy = {role: BusyClock(self._loop.time) for role in ("draft", "target", "verifier")}
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writing: dict[int, _WriteJob] = {}
        self._closing: set[asyncio.Task[None]] = set()
        # The stream of the job whose step was just written, for the job that writes the step after it.
        self._open: dict[int, _Stream] = {}

    async def run(self) -> Reply:
        started = self._loop.time()
        try:
            end = self._carry_out(self._machine.start())
            while end is None:
                event = await self._events.get()
                if isinstance(event, StepWritten) and event.job in self._writing:
                    self._open[event.job] = self._writing[event.job].stream
                end = self._carry_out(self._machine.handle(event))
        finally:
            await self._close_everything()
        self._report.seconds = {"total": self._loop.time() - started} | {
            role: clock.seconds for role, clock in self._busy.items()
        }
        self._report.speculation_off = self._machine.speculation_off
        return Reply(
            text=self._text.finish(),
            token_ids=tuple(self._text.token_ids),
            finish_reason="length" if end is StepEnd.BUDGET else "stop",
            report=self._report,
        )

    def _carry_out(self, actions: list[Action]) -> StepEnd | None:
        end: StepEnd | None = None
        for action in actions:
            match action:
                case StartDraft(job, node):
                    assert self._draft is not None
                    self._start_writing(job, node, Source.DRAFT, self._draft, live=False)
                case StartTarget(job, node, live):
                    self._start_writing(job, node, Source.TARGET, self._target, live)
                case Verify(job, draft, target):
                    self._report.verifier_calls += 1
                    self._spawn(job, partial(self._verify, job, draft, target))
                case Commit(node):
                    self._commit(node)
                case Reject(job):
                    written = self._writing.pop(job)
                    self._fates(written.stream).rejected += written.generated
                case Abort(job):
                    self._abort(job)
                case Finish(finished):
                    end = finished
                case Fail(reason):
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
        self._fates(written.stream).committed += written.generated
        if not written.live:
            self._text.commit(node.step.token_ids)

    def _abort(self, job: int) -> None:
        task = self._tasks.get(job)
        if task is not None:
            task.cancel()
        if (written := self._writing.pop(job, None)) is not None:
            self._fates(written.stream).aborted += written.generated
            self._retire(written.stream, task)

    def _retire(self, stream: _Stream, reader: asyncio.Task[None] | None = None) -> None:
        """Close a stream that nobody will read on, once the job that reads it has ended."""

        async def close() -> None:
            if reader is not None:
                await asyncio.wait({reader})
            await stream.close()

        self._fates(stream).aborted += len(stream.unread)
        stream.unread.clear()
        task = self._loop.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _fates(self, stream: _Stream) -> TokenFates:
        drafted = stream.source is Source.DRAFT
        return self._report.draft_tokens if drafted else self._report.target_tokens

    def _start_writing(self, job: int, node: Node, source: Source, engine: Engine, live: bool) -> None:
        reply, before = self._reply_until(node)
        budget = self._request.sampling.max_tokens - len(reply)
        stream = self._open.pop(node.job, None)
        if stream is not None and (stream.source is not source or not self._may_continue()):
            self._retire(stream)
            stream = None
        if stream is None:
            prompt = [*self._request.prompt_ids, *reply]
            sampling = replace(self._sampling(node), max_tokens=budget, stop=())
            stream = _Stream(source, engine.generate(prompt, sampling), engine.tokenizer.stream(prompt))
        written = _WriteJob(node, stream, Segmenter(self._rules, stream.text, before, budget), live)
        self._writing[job] = written
        self._spawn(job, partial(self._write, job, written))

    def _may_continue(self) -> bool:
        """Whether one engine request may write several steps.

        Not if sampling is seeded: a step's random numbers must not depend on which request wrote it.
        """
        return self._request.sampling.temperature == 0 or self._request.sampling.seed is None

    def _sampling(self, node: Node) -> Sampling:
        sampling = self._request.sampling
        if self._may_continue():
            return replace(sampling, seed=None)
        # Draft and target get the same random numbers at one position, which makes them agree more often.
        digest = hashlib.sha256(f"{sampling.seed}:{node.position}".encode()).digest()
        return replace(sampling, seed=int.from_bytes(digest[:4]))

    def _reply_until(self, node: Node) -> tuple[list[int], str]:
        """Tokens of the reply up to `node`, and its last text."""
        steps: list[Step] = []
        walk: Node | None = node
        while walk is not None and walk is not self._machine.front:
            assert walk.step is not None
            steps.append(walk.step)
            walk = walk.parent
        ids = [*self._text.token_ids]
        text = self._text.text
        for step in reversed(steps):
            ids.extend(step.token_ids)
            text += step.text
        return ids, text

    async def _write(self, job: int, written: _WriteJob) -> Event:
        stream = written.stream
        with self._busy[stream.source.value].busy():
            while True:
                while stream.unread:
                    token = stream.unread.popleft()
                    step = written.segmenter.push(token)
                    if written.live:
                        self._text.commit((token,))
                    if step is not None:
                        written.complete = True
                        return StepWritten(job, step)
                    self._look_for_refutation(written)
                if not await stream.read():
                    if stream.finish_reason is None:
                        raise EngineError("the engine ended a reply without saying why")
                    return StepWritten(job, written.segmenter.close(stream.finish_reason))

    def _look_for_refutation(self, written: _WriteJob) -> None:
        """See whether the target's step, as far as it is written, rules the draft's step from the same node out."""
        node = written.node
        if self._early is None or written.live or node.draft_refused:
            return
        target_job = node.target_job
        draft_job = node.draft_job if node.draft is None else node.draft.job
        target, draft = self._writing.get(target_job or 0), self._writing.get(draft_job or 0)
        if target_job is None or target is None or draft is None or not target.generated or not draft.generated:
            return
        if target.complete or target.refuted:
            return
        if self._early.refutes(draft.so_far, target.so_far):
            target.refuted = True
            self._report.refuted += 1
            self._events.put_nowait(Refuted(target_job))

    async def _verify(self, job: int, draft: Node, target: Node) -> Event:
        assert self._verifier is not None
        assert draft.step is not None
        assert target.step is not None
        assert draft.parent is not None
        _, before = self._reply_until(draft.parent)
        pair = StepPair(self._request.question, before, draft.step, target.step)
        with self._busy["verifier"].busy():
            async with asyncio.timeout(self._settings.verifier_timeout):
                verdict = await self._verifier.verify(pair)
        logger.debug("%s: %r for %r", verdict, draft.step.text, target.step.text)
        return Judged(job, verdict.accepted)

    def _spawn(self, job: int, work: Callable[[], Coroutine[Any, Any, Event]]) -> None:
        task = self._tasks[job] = self._loop.create_task(self._run_job(job, work))
        task.add_done_callback(lambda _: self._tasks.pop(job, None))

    async def _run_job(self, job: int, work: Callable[[], Coroutine[Any, Any, Event]]) -> None:
        try:
            event = await work()
        except Exception as error:
            logger.debug("job %d failed", job, exc_info=True)
            event = Failed(job, str(error) or type(error).__name__)
        self._events.put_nowait(event)

    async def _close_everything(self) -> None:
        for job in list(self._writing):
            self._abort(job)
        for task in self._tasks.values():
            task.cancel()
        cleaning = asyncio.gather(*self._tasks.values(), *self._closing, return_exceptions=True)
        try:
            await asyncio.shield(cleaning)
        except asyncio.CancelledError:  # cancelled again: the engine's requests must still be aborted first
            await cleaning
            raise
        for result in cleaning.result():
            if isinstance(result, Exception):
                logger.warning("closing an engine request failed: %s", result)
