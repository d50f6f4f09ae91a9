"""Records everything that a pair writes to a prompt: steps of both models, draft tokens and verdicts."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import count
from typing import Any

from lookahead_agent.decoding.prefixes import Prefixes
from lookahead_agent.decoding.request import DecodingSettings, ReplyRequest
from lookahead_agent.decoding.segmenter import Segmenter
from lookahead_agent.decoding.step import Node, Source, Step, StepEnd, comparable, usable
from lookahead_agent.decoding.streams import step_rules
from lookahead_agent.decoding.verifier import StepPair, Verdict, Verifier
from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.replay.recording import (
    VERSION,
    PrefixTree,
    Recording,
    RegionsRecord,
    ReplyRecord,
    StepRecord,
    Tokens,
    VerdictRecord,
    Writer,
)
from lookahead_agent.system.background import gather_or_cancel, wait_for_end

_DRAFT_REQUESTS = 8  # concurrent requests for draft tokens


@dataclass(eq=False)
class Recorder:
    """Records what a target and its draft, with one tokenizer, write under a verifier at temperature 0."""

    target: Engine
    draft: Engine
    verifier: Verifier
    decoding: DecodingSettings  # `depth` is the length of the draft's chain of steps
    _: KW_ONLY
    settings: dict[str, Any] = field(default_factory=dict)  # field of the rows, as `environment`
    environment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.target.tokenizer.fingerprint != self.draft.tokenizer.fingerprint:
            raise ConfigurationError("target and draft have different tokenizers: a recording needs one for both")

    async def record(self, requests: Mapping[str, ReplyRequest]) -> list[Recording]:
        """Record everything that the pair writes to each of some prompts, by name, at once; raises EngineError."""
        recorders = []
        for name, request in requests.items():
            if request.sampling.temperature or request.sampling.structured is not None:
                raise ConfigurationError("a recording needs temperature 0, and no structured output")
            most = min(request.sampling.max_tokens, self.target.context_length - len(request.prompt_ids))
            request = replace(request, sampling=replace(request.sampling, max_tokens=most))
            recorders.append(_PromptRecorder(self, name, request))
        await gather_or_cancel(each.write() for each in recorders)
        # One by one, so that the seconds of a verdict are those of an idle machine.
        return [await each.record() for each in recorders]


class _PromptRecorder:
    """The recording of one prompt. A prefix is a `Node` of the decoder, and a number in the tree."""

    def __init__(self, recorder: Recorder, name: str, request: ReplyRequest) -> None:
        self._recorder = recorder
        self._name = name
        self._request = request
        self._tokenizer = recorder.target.tokenizer
        self._prefixes = Prefixes(request, self._tokenizer, self._tokenizer, lambda _: None)
        self._rules = step_rules(request, recorder.decoding, self._tokenizer)
        self._tree = PrefixTree()
        self._jobs = count()
        self._at: dict[int, int] = {-1: 0}  # each node's prefix in the tree, by the node's job
        self._steps: dict[tuple[Source, int], asyncio.Task[Node]] = {}  # tasks by model and prefix before the step
        self._written: list[Node] = []  # nodes in the order of the recording's steps
        # Judged pairs and their verdicts, by indices of draft and target step
        self._verdicts: dict[tuple[int, int], tuple[StepPair, Verdict]] = {}
        self._committed = self._alone = Node(0)  # the replies with step speculation, and of the target alone

    async def write(self) -> None:
        try:
            self._committed = await self._write_lookahead()
            self._alone = await self._write_alone()
            await self._write_draft_tokens()
        finally:
            for task in self._steps.values():
                task.cancel()
            await wait_for_end(self._steps.values())

    async def record(self) -> Recording:
        """Time the verdicts, and return the recording of what is written."""
        verdicts = [await self._verdict_record(*each) for each in self._verdicts.items()]
        request, recorder, stream = self._request, self._recorder, self._tokenizer.stream()
        regions = request.regions
        return Recording(
            version=VERSION,
            name=self._name,
            question=request.question,
            prompt=Tokens(ids=request.prompt_ids, texts=tuple(map(stream.push, request.prompt_ids))),
            max_tokens=request.sampling.max_tokens,
            regions=RegionsRecord(
                action_markers=regions.action_markers,
                thinking=regions.thinking,
                answer_from_target=regions.answer_from_target,
            ),
            tokenizer=self._tokenizer.fingerprint,
            eos_ids=tuple(sorted(self._tokenizer.eos_ids)),
            runs=self._tree.records(),
            steps=tuple(map(self._step_record, self._written)),
            verdicts=tuple(verdicts),
            target_alone=self._reply(self._alone),
            lookahead=self._reply(self._committed),
            settings=recorder.settings,
            environment=recorder.environment,
        )

    async def _write_alone(self) -> Node:
        node = Node(0)
        while not node.ends_reply:
            node = await self._step_after(Source.TARGET, node, awaits_thinking=False)
        return node

    async def _write_lookahead(self) -> Node:
        """Write the reply as the decoder does, with all that it may start at any speed of its engines."""
        node, awaits_thinking = Node(0), self._prefixes.awaits_thinking
        speculating = not awaits_thinking
        while not node.ends_reply:
            if speculating:
                node = await self._decide(node)
            else:
                node = await self._step_after(Source.TARGET, node, awaits_thinking)
            assert node.step is not None
            if node.opens_action:
                speculating = awaits_thinking = False
            elif node.step.end is StepEnd.THINKING and awaits_thinking:
                speculating, awaits_thinking = True, False
        return node

    async def _decide(self, front: Node) -> Node:
        """Write the draft's chain of steps and the target's step after each, judge them, and return the next front."""
        chain = [front]
        while len(chain) <= self._recorder.decoding.depth and not (chain[-1].ends_reply or chain[-1].opens_action):
            self._start(Source.TARGET, chain[-1], awaits_thinking=False)  # the draft's next step runs beside it
            drafted = await self._step_after(Source.DRAFT, chain[-1], awaits_thinking=False)
            assert drafted.step is not None
            chain.append(drafted)
            if not usable(drafted.step):
                break
        before = chain[:-1]
        targets = [await self._step_after(Source.TARGET, node, awaits_thinking=False) for node in before]
        verdicts = [await self._judge(*pair) for pair in zip(before, chain[1:], targets, strict=True)]
        return chain[1] if verdicts[0] else targets[0]

    async def _judge(self, before: Node, draft: Node, target: Node) -> bool:
        assert draft.step is not None
        assert target.step is not None
        if not comparable(draft.step, target.step):
            return False
        key = self._written.index(draft), self._written.index(target)
        if key not in self._verdicts:
            request = self._request
            text, salt = self._prefixes.text(before), request.sampling.cache_salt
            pair = StepPair(request.question, text, draft.step, target.step, before.position, salt)
            self._verdicts[key] = pair, await self._recorder.verifier.verify(pair)
        return self._verdicts[key][1].accepted

    async def _verdict_record(self, key: tuple[int, int], judged: tuple[StepPair, Verdict]) -> VerdictRecord:
        """The record of a verdict, which is asked for again: under another salt, as if it were the first time."""
        pair, verdict = judged
        started = time.perf_counter()
        await self._recorder.verifier.verify(replace(pair, cache_salt=self._name))
        seconds = time.perf_counter() - started
        return VerdictRecord(
            draft=key[0],
            target=key[1],
            accepted=verdict.accepted,
            seconds=seconds,
            reason=verdict.reason,
            score=verdict.score,
        )

    async def _step_after(self, source: Source, node: Node, awaits_thinking: bool) -> Node:
        return await self._start(source, node, awaits_thinking)

    def _start(self, source: Source, node: Node, awaits_thinking: bool) -> asyncio.Task[Node]:
        key = source, self._at[node.job]
        if key not in self._steps:
            task = asyncio.get_running_loop().create_task(self._write_step(source, node, awaits_thinking))
            self._steps[key] = task
        return self._steps[key]

    async def _write_step(self, source: Source, node: Node, awaits_thinking: bool) -> Node:
        thinking = self._request.regions.thinking
        rules = self._rules
        if awaits_thinking and thinking is not None:
            rules = replace(rules, thinking_marker=thinking.open)
        stream = self._tokenizer.stream(self._prefixes.ids(node, Source.TARGET))
        budget = self._request.sampling.max_tokens - self._prefixes.reply_length(node)
        segmenter = Segmenter(rules, stream, self._prefixes.context(node), budget)
        step: Step | None = None

        def read(token: int) -> tuple[str, bool]:
            nonlocal step
            before = len(segmenter.text)
            step = segmenter.push(token)
            return segmenter.text[before:], step is None

        model: Writer = "draft" if source is Source.DRAFT else "target"
        end = await self._write(model, self._at[node.job], budget, read)
        step = step or segmenter.close("length")
        written = Node(node.position + 1, node, source, step, next(self._jobs))
        self._at[written.job] = end
        self._written.append(written)
        return written

    async def _write(self, model: Writer, prefix: int, limit: int, read: Callable[[int], tuple[str, bool]]) -> int:
        """Read recorded tokens and then the engine's, until `read` has enough; return the prefix that they end.

        `read` takes a token, and returns the text that it completes and whether it wants more.
        """
        more, written = True, 0
        while more and written < limit:
            if (longer := self._tree.follow(model, prefix)) is not None:
                more, written, prefix = read(self._tree.ids[longer])[1], written + 1, longer
                continue
            run: int | None = None
            async with aclosing(self._generate(model, prefix, limit - written)) as tokens:
                async for token in tokens:
                    # Another step may have recorded the rest meanwhile, and a tie may have ended otherwise there.
                    if self._tree.follow(model, prefix) is not None:
                        break
                    text, more = read(token)
                    run, prefix = self._tree.add(model, prefix, token, text, run)
                    written += 1
                    if not more:
                        return prefix
                else:
                    return prefix
        return prefix

    async def _generate(self, model: Writer, prefix: int, max_tokens: int) -> AsyncGenerator[int, None]:
        engine = self._recorder.draft if model == "draft" else self._recorder.target
        prompt = [*self._request.prompt_ids, *self._tree.reply(prefix)]
        salt = self._request.sampling.cache_salt
        deltas = engine.generate(prompt, Sampling(max_tokens=max_tokens, cache_salt=salt, drafted=False))
        async with aclosing(deltas):
            async for delta in deltas:
                for token in delta.token_ids:
                    yield token

    async def _write_draft_tokens(self) -> None:
        """Write the draft's token after every prefix that the target continues."""
        pending = {prefix for prefix in self._tree.next["target"] if prefix not in self._tree.next["draft"]}
        followers = {self._tree.follow("target", prefix) for prefix in pending}
        slots = asyncio.Semaphore(_DRAFT_REQUESTS)

        async def draft_line(prefix: int) -> None:
            async with slots:
                await self._draft_line(prefix)

        await gather_or_cancel(draft_line(prefix) for prefix in sorted(pending - followers))

    async def _draft_line(self, prefix: int) -> None:
        """Write the draft's token after a prefix and after each longer one that the target continues."""
        tree = self._tree
        place: int | None = prefix
        while place is not None and place in tree.next["target"] and place not in tree.next["draft"]:
            stream = self._tokenizer.stream([*self._request.prompt_ids, *tree.reply(place)])
            length, longer = 0, place
            while (following := tree.follow("target", longer)) is not None and longer not in tree.next["draft"]:
                length, longer = length + 1, following
            run: int | None = None
            async with aclosing(self._generate("draft", place, length)) as tokens:
                async for token in tokens:
                    agrees = token == tree.next["target"].get(place)
                    run, drafted = tree.add("draft", place, token, stream.push(token), run)
                    place = drafted if agrees else tree.follow("target", place)
                    if not agrees or place is None or place not in tree.next["target"]:
                        break

    def _step_record(self, node: Node) -> StepRecord:
        assert node.parent is not None
        assert node.step is not None
        after, end = (self._tree.places[self._at[each.job]] for each in (node.parent, node))
        assert end is not None
        model: Writer = "draft" if node.source is Source.DRAFT else "target"
        return StepRecord(model=model, after=after, end=end, position=node.position - 1, ended_by=node.step.end)

    def _reply(self, node: Node) -> ReplyRecord:
        ids, steps, accepted = self._tree.reply(self._at[node.job]), 0, 0
        at: Node | None = node
        while at is not None and at.parent is not None:
            steps, accepted, at = steps + 1, accepted + (at.source is Source.DRAFT), at.parent
        return ReplyRecord(ids=tuple(ids), steps=steps, accepted=accepted)
