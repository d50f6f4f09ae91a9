"""The decoder under faults at any time; in virtual time, hangs and timeouts take no real time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_agent.decoding import DecodingSettings, Reply, lookahead
from lookahead_agent.decoding.accounting import ReplyClock
from lookahead_agent.decoding.verifier import DraftStep, PartialStep, StepPair, Verdict
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep
from lookahead_agent.engines.protocol import Delta
from lookahead_agent.engines.scripted import script_from_steps
from lookahead_agent.errors import EngineError
from lookahead_agent.system.background import describe
from lookahead_agent.verifiers.model_free import ExactVerifier
from lookahead_agent.verifiers.scores import ScoreVerifier
from tests.unit.scripts import Pair, ScriptedVerifier, Steps, scripted
from tests.virtual_time import run_in_virtual_time

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
ACCEPT_ALL = ScriptedVerifier(lambda draft, target: True)


def test_silent_draft_disables_speculation_even_if_the_target_overtakes_it() -> None:
    steps = [f"Step {number}.\n\n" for number in range(10)]
    pair = Pair(steps, [ScriptedStep("", hangs=True)] * 10, target_seconds=5)
    reply = pair.run(ACCEPT_ALL, DecodingSettings(draft_timeout=12))
    assert reply.text == "".join(steps)
    assert reply.report.speculation_disabled == "the draft model timed out after 12 s"
    assert reply.report.seconds["total"] == pytest.approx(50), "a silent draft must not delay the target"


def test_idle_timeout_ignores_a_draft_that_waits_for_the_target() -> None:
    pair = Pair(STEPS, STEPS, target_seconds=100)
    reply = pair.run(ACCEPT_ALL, DecodingSettings(draft_timeout=3, depth=1))
    assert reply.report.speculation_disabled is None
    assert reply.report.accepted == 4


def test_idle_timeout_ignores_a_stopped_draft() -> None:
    """The target's step outlasts the timeout, and its first token refutes the draft's step."""
    slow = ScriptedStep("No, not so at all.\n\n", 50)
    pair = Pair(["So it is.\n\n", *STEPS], [slow, *STEPS], target_seconds=100)
    reply = pair.run(ExactVerifier(), DecodingSettings(draft_timeout=10, depth=1))
    assert reply.report.refuted
    assert reply.report.speculation_disabled is None


def test_silent_target_times_out_and_fails_the_reply() -> None:
    pair = Pair(["First this.\n\n", ScriptedStep("Then", 1, hangs=True)], STEPS)
    with pytest.raises(EngineError, match="the target model timed out after 30 s"):
        pair.run(ACCEPT_ALL, DecodingSettings(target_timeout=30))
    assert pair.draft is not None
    assert pair.target.in_flight == pair.draft.in_flight == 0


@pytest.mark.parametrize(
    ("invalid", "reason"),
    [
        (ScriptedStep("", 1, ids=(10**6, 5)), "a token that is not in the vocabulary"),
        (ScriptedStep("Fir", 1, ids=(3, 99_999)), "a token that is not in the vocabulary"),
    ],
)
def test_draft_tokens_outside_the_vocabulary_never_reach_the_target(invalid: ScriptedStep, reason: str) -> None:
    pair = Pair(STEPS, [invalid, *STEPS[1:]], target_seconds=30)
    reply = pair.run(ACCEPT_ALL)
    assert reply.text == "".join(STEPS)
    assert reason in (reply.report.speculation_disabled or "")
    assert all(max(prompt) < pair.tokenizer.size for prompt, _ in pair.target.requests)


def test_draft_that_ends_at_once_is_not_accepted() -> None:
    reply = Pair(STEPS, []).run(ACCEPT_ALL)
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 0


class FilteringEngine(ScriptedEngine):
    """Ends the replies to some prefixes for a reason of its own."""

    reasons: Callable[[str], str | None]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        async for delta in super().generate(prompt_ids, sampling):
            reason = self.reasons(self.tokenizer.decode(prompt_ids))
            filters = delta.finish_reason == "stop" and reason is not None
            yield replace(delta, token_ids=delta.token_ids[:-1], finish_reason=reason) if filters else delta


@pytest.mark.parametrize(
    ("max_tokens", "filtered", "finish_reason"),
    [(9, "refuted", "length"), (99, "refuted", "stop"), (99, "committed", "content_filter")],
)
def test_the_finish_reason_is_that_of_the_committed_step(max_tokens: int, filtered: str, finish_reason: str) -> None:
    """Target steps after refuted draft steps end meanwhile, for other reasons."""
    pair = Pair([], ["But no.\n\n", "But yes.\n\n"])

    def script(prompt: str, reply: str) -> Sequence[ScriptedStep]:
        steps = ["First this.\n\n", "Then that, and so on, and more of it.\n\n", "Done."]
        after_draft = [ScriptedStep("So", 0.1)]
        return after_draft if "But" in reply else script_from_steps(scripted(steps, 3.0))(prompt, reply)

    def reasons(prefix: str) -> str | None:
        return "content_filter" if ("But" in prefix) is (filtered == "refuted") else None

    target = FilteringEngine(pair.tokenizer, script, len(pair.prompt))
    target.reasons = reasons
    verifier, request = ScriptedVerifier(lambda draft, target: False, 10.0), pair.request(Sampling(max_tokens))
    reply = run_in_virtual_time(lookahead(request, target, pair.draft, verifier))
    assert reply.text.startswith("First this.\n\nThen that, and")
    assert reply.finish_reason == finish_reason


@dataclass
class InvalidVerifier:
    """Returns an invalid verdict."""

    verdict: object

    async def verify(self, pair: StepPair) -> Verdict:
        return self.verdict  # type: ignore[return-value]


@pytest.mark.parametrize("verdict", [None, True, Verdict(True, "score", math.nan)])
def test_invalid_verdict_disables_speculation(verdict: object) -> None:
    reply = Pair(STEPS, STEPS).run(InvalidVerifier(verdict))
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 0
    assert reply.report.speculation_disabled is not None


def test_target_that_fails_as_judge_completes_the_reply_alone() -> None:
    pair = Pair(STEPS, STEPS, logprobs={})
    reply = pair.run(ScoreVerifier(pair.target, 5))
    assert reply.text == "".join(STEPS)
    assert reply.report.speculation_disabled is not None


def test_waiting_time_is_zero_if_an_engine_is_always_busy() -> None:
    reply = Pair(STEPS, STEPS).run(ACCEPT_ALL)
    assert reply.report.seconds["waiting"] == pytest.approx(0)


def test_waiting_time_is_that_in_which_nothing_is_busy() -> None:
    at = 0.0
    clock = ReplyClock(lambda: at)
    at = 1.0
    with clock.target:
        at = 3.0
        with clock.draft:
            at = 4.0
    at = 6.0
    with clock.verifier:
        at = 6.5
    at = 8.0
    seconds = clock.seconds()
    assert [seconds[each] for each in ("total", "target", "draft", "verifier")] == [8.0, 3.0, 1.0, 0.5]
    assert seconds["waiting"] == 1.0 + 2.0 + 1.5


def test_prefill_and_decode_times_add_up_to_the_total() -> None:
    seconds = Pair(STEPS, STEPS).run(ACCEPT_ALL).report.seconds
    assert 0 < seconds["prompt"] < seconds["total"]
    assert seconds["prompt"] + seconds["writing"] == pytest.approx(seconds["total"])
    assert 0 < seconds["draft_prompt"] < seconds["draft"]
    assert seconds["draft_prompt"] + seconds["draft_writing"] == pytest.approx(seconds["draft"])


@dataclass
class Case:
    """The scripts of two models, a verifier, and settings; scripts and verifier may contain faults."""

    target: Steps
    draft: Steps
    sampled: Steps
    verifier: object
    settings: DecodingSettings
    sampling: Sampling
    two_tokenizers: bool
    tokens_per_delta: int
    cancelled_after: float | None
    lossless: bool = field(default=False)


TEXTS = st.sampled_from(["So.", "It is 1.", "It is 2.", "Then we go on.", "And now, because of all that, much more."])
SECONDS = st.sampled_from([0.0, 0.4, 1.0, 3.0])


@st.composite
def step_scripts(draw: st.DrawFn, faults: bool) -> Steps:
    texts = draw(st.lists(TEXTS, min_size=1, max_size=6))
    steps = [
        ScriptedStep(text + ("\n\n" if number < len(texts) - 1 else ""), draw(SECONDS))
        for number, text in enumerate(texts)
    ]
    if faults and draw(st.booleans()):
        at = draw(st.integers(0, len(steps) - 1))
        fault = draw(
            st.sampled_from(
                [
                    ScriptedStep("So", 0.5, error="out of memory"),
                    ScriptedStep("It", 0.5, hangs=True),
                    ScriptedStep("", 0.5, ids=(10**6,)),
                ]
            )
        )
        steps[at] = fault
    return steps


@st.composite
def cases(draw: st.DrawFn) -> Case:
    target = draw(step_scripts(faults=False))
    draft = target if draw(st.booleans()) else draw(step_scripts(faults=True))
    verifier_name = draw(st.sampled_from(["exact", "all", "none", "odd", "fails", "hangs"]))
    seconds = draw(SECONDS)
    verifier: object = {
        "exact": ExactVerifier(),
        "all": ScriptedVerifier(lambda d, t: True, seconds),
        "none": ScriptedVerifier(lambda d, t: False, seconds),
        "odd": ScriptedVerifier(lambda d, t: len(d) % 2 == 1, seconds),
        "fails": ScriptedVerifier(lambda d, t: True, seconds, error="judge is away"),
        "hangs": ScriptedVerifier(lambda d, t: True, 1e9),
    }[verifier_name]
    return Case(
        target,
        draft,
        draw(step_scripts(faults=True)),
        verifier,
        DecodingSettings(
            depth=draw(st.integers(1, 5)),
            width=draw(st.integers(1, 3)),
            hedge=draw(st.booleans()),
            synchronous=draw(st.booleans()),
            early=draw(st.booleans()),
            max_step_tokens=draw(st.sampled_from([3, 100, 100])),
            verifier_timeout=7,
            draft_timeout=9,
        ),
        Sampling(
            max_tokens=draw(st.sampled_from([1, 10, 1000, 1000])),
            temperature=draw(st.sampled_from([0.0, 0.0, 0.8])),
            seed=draw(st.sampled_from([None, 3])),
        ),
        draw(st.booleans()),
        draw(st.integers(1, 4)),
        draw(st.one_of(st.none(), st.none(), st.floats(0, 12))),
        lossless=verifier_name in ("exact", "none"),
    )


def hold_guarantees(case: Case) -> None:
    pair = Pair(
        case.target,
        case.draft,
        sampled=case.sampled,
        two_tokenizers=case.two_tokenizers,
        tokens_per_delta=case.tokens_per_delta,
    )
    alone = Pair(case.target, None).run(sampling=case.sampling)

    async def run() -> Reply | None:
        task = asyncio.create_task(
            lookahead(pair.request(case.sampling), pair.target, pair.draft, case.verifier, case.settings)  # type: ignore[arg-type]
        )
        if case.cancelled_after is not None:
            await asyncio.sleep(case.cancelled_after)
            task.cancel()
        try:
            reply = await task
        except asyncio.CancelledError:
            reply = None
        assert pair.draft is not None
        assert pair.target.in_flight == pair.draft.in_flight == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return reply

    reply = run_in_virtual_time(run())
    if reply is None:
        assert case.cancelled_after is not None
        return
    pair.check_accounts(reply)
    assert len(reply.token_ids) <= case.sampling.max_tokens
    if case.lossless:
        assert reply.text == alone.text
        assert reply.finish_reason == alone.finish_reason
    if reply.finish_reason == "stop" and case.settings.max_step_tokens == 100:
        scripts = (case.target, case.draft, case.sampled)
        scripted = {step.text.strip() for steps in scripts for step in steps if isinstance(step, ScriptedStep)}
        assert {part.strip() for part in reply.text.split("\n\n")} <= scripted | {""}, "every step is whole"


@given(case=cases())
@settings(max_examples=600)
def test_any_fault_leaves_a_complete_reply_and_no_request(case: Case) -> None:
    hold_guarantees(case)


class UnprintableError(Exception):
    """An error of foreign code that cannot be described."""

    def __str__(self) -> str:
        raise SystemExit("no text")


FOREIGN = [
    RuntimeError("broken"),
    UnprintableError(),
    SystemExit("bye"),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    GeneratorExit(),
    StopAsyncIteration(),
    TimeoutError(),
]
PLACES = ["verify", "refutes", "verify_draft", "call", "first token", "later token", "close"]


@dataclass
class ForeignVerifier:
    """Raises an error where it is called; accepts everything else."""

    error: BaseException | None
    place: str

    async def verify(self, pair: StepPair) -> Verdict:
        await asyncio.sleep(0.1)
        if self.error is not None and self.place == "verify":
            raise self.error
        return Verdict(pair.same_text, "script")

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        if self.error is not None and self.place == "refutes":
            raise self.error
        return False


@dataclass
class ForeignDraftVerifier:
    """The same without target steps."""

    error: BaseException

    async def verify_draft(self, step: DraftStep) -> Verdict:
        await asyncio.sleep(0.1)
        raise self.error


@dataclass(eq=False)
class ForeignEngine:
    """Passes an engine's tokens on, and raises an error at one place of a request."""

    engine: ScriptedEngine
    error: BaseException
    place: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        if self.place == "call":
            raise self.error
        return self._generate(prompt_ids, sampling)

    async def _generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        try:
            async with aclosing(self.engine.generate(prompt_ids, sampling)) as deltas:
                async for delta in deltas:
                    if self.place == "first token":
                        raise self.error
                    yield delta
                    if self.place == "later token":
                        raise self.error
        finally:
            if self.place == "close":
                raise self.error


@given(
    place=st.sampled_from(PLACES),
    error=st.sampled_from(FOREIGN),
    fails=st.sampled_from(["draft", "target"]),
    settings=st.builds(
        DecodingSettings,
        depth=st.integers(1, 4),
        width=st.integers(1, 2),
        hedge=st.booleans(),
        synchronous=st.booleans(),
        shared_draft=st.just(False),
    ),
)
@settings(max_examples=250, deadline=None)
def test_foreign_exceptions_end_only_their_own_job(
    place: str, error: BaseException, fails: str, settings: DecodingSettings
) -> None:
    pair = Pair(STEPS, STEPS)
    engines: dict[str, Any] = {"target": pair.target, "draft": pair.draft}
    verifier: Any = ForeignVerifier(error, place)
    if place == "verify_draft":
        verifier = ForeignDraftVerifier(error)
    elif place not in ("verify", "refutes"):
        engines[fails] = ForeignEngine(engines[fails], error, place)

    async def run() -> Reply | EngineError:
        try:
            return await lookahead(pair.request(), engines["target"], engines["draft"], verifier, settings)
        except EngineError as failure:
            return failure
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing runs after the reply"

    reply = run_in_virtual_time(run())
    assert pair.draft is not None
    assert pair.target.in_flight == pair.draft.in_flight == 0
    if isinstance(reply, EngineError):
        assert fails == "target"
        assert place in ("call", "first token", "later token", "close")
        ended_silently = isinstance(error, StopAsyncIteration)  # the end of a stream, or an error of the generator
        assert ended_silently or type(error).__name__ in str(reply) or str(error) in str(reply)
        return
    assert reply.text == "".join(STEPS)
    if place != "first token":  # which the engine generates and nobody gets
        pair.check_accounts(reply)
    if place in ("verify", "verify_draft"):
        assert reply.report.speculation_disabled == (str(error) if isinstance(error, RuntimeError) else describe(error))


@pytest.mark.parametrize("writes", [True, False], ids=["while it is closed", "while it is read"])
def test_an_engine_that_does_not_end_is_abandoned(writes: bool, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(STEPS, ["Other.\n\n"] * 4)
    given = pair.draft
    assert given is not None
    ended = asyncio.Event()

    class Endless(ForeignEngine):
        async def _generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
            try:
                if not writes:
                    await asyncio.Event().wait()
                yield Delta(tuple(pair.tokenizer.encode("Other.\n\n")))
            finally:
                while not ended.is_set():
                    with suppress(asyncio.CancelledError):
                        await ended.wait()

    async def run() -> Reply:
        draft = Endless(given, RuntimeError(), "")
        reply = await lookahead(pair.request(), pair.target, draft, ExactVerifier(), DecodingSettings(depth=1))  # type: ignore[arg-type]
        ended.set()
        await asyncio.sleep(1)
        return reply

    assert run_in_virtual_time(run()).text == "".join(STEPS)
    assert "abandoned" in caplog.text


@dataclass
class HangingVerifier:
    """Never answers from one of its calls on."""

    hangs_from: int = 1
    calls: int = 0

    async def verify(self, pair: StepPair) -> Verdict:
        self.calls += 1
        if self.calls >= self.hangs_from:
            await asyncio.Event().wait()
        return Verdict(pair.same_text, "script")


class HangingDraftVerifier:
    """Never answers."""

    async def verify_draft(self, step: DraftStep) -> Verdict:
        await asyncio.Event().wait()
        raise AssertionError


class AcceptingDraftVerifier:
    """Accepts every draft step at once."""

    async def verify_draft(self, step: DraftStep) -> Verdict:
        return Verdict(True, "script")


LONG = [f"Step {number}.\n\n" for number in range(10)] + ["End."]
HANGS = [ScriptedStep("", hangs=True)] * len(LONG)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize(
    ("draft", "verifier"),
    [
        (LONG, HangingVerifier(3)),
        (LONG, HangingDraftVerifier()),
        (HANGS, ACCEPT_ALL),
        (HANGS, AcceptingDraftVerifier()),
        (LONG[:3] + HANGS[3:], AcceptingDraftVerifier()),
    ],
)
def test_a_hang_costs_a_reply_one_wait_and_the_target_goes_on(
    synchronous: bool, draft: Steps, verifier: object
) -> None:
    """The timeouts are far longer than the reply: the target does not wait for them."""
    pair = Pair(LONG, draft, target_seconds=1, draft_seconds=0.1)
    settings = DecodingSettings(synchronous=synchronous)
    reply = pair.run(replace(verifier) if isinstance(verifier, HangingVerifier) else verifier, settings)  # type: ignore[arg-type]
    assert reply.text == "".join(LONG)
    assert reply.report.seconds["total"] <= len(LONG) + settings.patience + 1
    if not isinstance(verifier, ScriptedVerifier | AcceptingDraftVerifier):
        assert reply.report.silent == "verifier"
        assert reply.report.speculation_disabled == "the verifier timed out after 2 s"


def test_a_slow_verifier_is_waited_for_longer_once_it_has_answered() -> None:
    slow = ScriptedVerifier(lambda draft, target: True, seconds=7)
    reply = Pair(LONG, LONG, target_seconds=5, draft_seconds=1).run(slow)
    assert reply.report.speculation_disabled is None
    assert reply.report.silent is None
    assert reply.report.accepted > 5


class PartlyHangingVerifier:
    """Never answers the reply to one question, and accepts everything else."""

    async def verify_draft(self, step: DraftStep) -> Verdict:
        if step.question == "hangs":
            await asyncio.Event().wait()
        return Verdict(True, "script")


@pytest.mark.parametrize(
    ("part", "draft", "verifier"),
    [("draft", HANGS, AcceptingDraftVerifier), ("verifier", LONG, PartlyHangingVerifier)],
)
def test_a_part_that_serves_other_replies_meanwhile_is_not_silent(part: str, draft: Steps, verifier: Any) -> None:
    """A draft or verifier with many requests at once lets some wait; its next replies have it all the same."""

    async def replies(*temperatures: float) -> list[Reply]:
        pair, shared = Pair(LONG, draft, target_seconds=1, draft_seconds=0.1, sampled=LONG), verifier()
        assert pair.draft is not None
        requests = [
            replace(pair.request(Sampling(10_000, temperature=each)), question="answers" if each else "hangs")
            for each in temperatures
        ]
        settings = DecodingSettings(shared_draft=False, synchronous=True)
        return await asyncio.gather(
            *(lookahead(request, pair.target, pair.draft, shared, settings) for request in requests)
        )

    alone = run_in_virtual_time(replies(0.0))
    busy = run_in_virtual_time(replies(0.0, 1.0))
    assert [reply.report.silent for reply in alone] == [part]
    assert [reply.report.silent for reply in busy] == [None, None]
    assert busy[0].report.speculation_disabled is not None, "this reply still goes on without it"


def test_a_verifier_that_raises_a_timeout_itself_is_not_silent() -> None:
    reply = Pair(STEPS, STEPS).run(ForeignVerifier(TimeoutError("the judge's server timed out"), "verify"))
    assert reply.report.speculation_disabled == "the judge's server timed out"
    assert reply.report.silent is None


def test_a_stalled_engine_fails_the_reply_unless_it_gives_tokens_to_others() -> None:
    async def replies(stall: float | None, others: int) -> list[Reply | BaseException]:
        pair = Pair([ScriptedStep("One", 1, hangs=True)], None)
        busy = replace(pair.target, script=scripted([f"{number} and so on." for number in range(others)], 40))
        shared = ForeignEngine(pair.target, RuntimeError(), "")
        shared.generate = lambda ids, sampling: (busy if sampling.temperature else pair.target).generate(ids, sampling)  # type: ignore[method-assign]
        settings = DecodingSettings(stall_timeout=stall)
        requests = [pair.request(), *([pair.request(Sampling(1000, temperature=1.0))] if others else [])]
        return await asyncio.gather(
            *(asyncio.wait_for(lookahead(each, shared, settings=settings), 3600) for each in requests),  # type: ignore[arg-type]
            return_exceptions=True,
        )

    async def timed(stall: float | None, others: int = 0) -> tuple[BaseException, float]:
        began = asyncio.get_running_loop().time()
        result, *rest = await replies(stall, others)
        assert isinstance(result, BaseException)
        assert not any(isinstance(each, BaseException) for each in rest)
        return result, asyncio.get_running_loop().time() - began

    error, seconds = run_in_virtual_time(timed(120))
    assert isinstance(error, EngineError)
    assert "the target model timed out after 12" in str(error)
    assert 120 < seconds < 130, "each token of the prompt adds a tenth of a second"
    error, seconds = run_in_virtual_time(timed(120, others=10))
    assert isinstance(error, EngineError)
    assert seconds > 400, "a request may wait behind others"
    error, _ = run_in_virtual_time(timed(None))
    assert isinstance(error, TimeoutError), "None is no limit"
