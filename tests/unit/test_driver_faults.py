"""The decoder under faults at every moment: in virtual time, a hang of an hour takes no time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_agent.decoding import DecodingSettings, Reply, lookahead
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines import Sampling, ScriptedStep
from lookahead_agent.errors import EngineError
from lookahead_agent.verifiers.exact import ExactVerifier
from lookahead_agent.verifiers.score import ScoreVerifier
from tests.unit.scripts import Pair, ScriptedVerifier, Steps
from tests.virtual_time import run_in_virtual_time

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
ALL = ScriptedVerifier(lambda draft, target: True)


def test_a_silent_draft_ends_the_speculation_although_the_target_overtakes_it() -> None:
    steps = [f"Step {number}.\n\n" for number in range(10)]
    pair = Pair(steps, [ScriptedStep("", hangs=True)] * 10, target_seconds=5)
    reply = pair.run(ALL, DecodingSettings(draft_timeout=12))
    assert reply.text == "".join(steps)
    assert reply.report.speculation_disabled == "the draft model gave no sign of life for 12 s"
    assert reply.report.seconds["total"] == pytest.approx(50), "it costs no time"


def test_a_draft_that_waits_for_its_turn_is_not_silent() -> None:
    pair = Pair(STEPS, STEPS, target_seconds=100)
    reply = pair.run(ALL, DecodingSettings(draft_timeout=3, depth=1))
    assert reply.report.speculation_disabled is None
    assert reply.report.accepted == 4


def test_a_draft_that_was_stopped_is_not_silent_while_nobody_asks_it() -> None:
    """The target's step takes longer than the limit, and rules the draft's out at its first token."""
    slow = ScriptedStep("No, not so at all.\n\n", 50)
    pair = Pair(["So it is.\n\n", *STEPS], [slow, *STEPS], target_seconds=100)
    reply = pair.run(ExactVerifier(), DecodingSettings(draft_timeout=10, depth=1))
    assert reply.report.refuted
    assert reply.report.speculation_disabled is None


def test_a_silent_target_fails_the_reply() -> None:
    pair = Pair(["First this.\n\n", ScriptedStep("Then", 1, hangs=True)], STEPS)
    with pytest.raises(EngineError, match="the target model gave no sign of life for 30 s"):
        pair.run(ALL, DecodingSettings(target_timeout=30))
    assert pair.draft is not None
    assert pair.target.in_flight == pair.draft.in_flight == 0


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (ScriptedStep("", 1, ids=(10**6, 5)), "a token that is not in the vocabulary"),
        (ScriptedStep("Fir", 1, ids=(3, 99_999)), "a token that is not in the vocabulary"),
    ],
)
def test_tokens_of_no_vocabulary_never_reach_the_target(garbage: ScriptedStep, reason: str) -> None:
    pair = Pair(STEPS, [garbage, *STEPS[1:]], target_seconds=30)
    reply = pair.run(ALL)
    assert reply.text == "".join(STEPS)
    assert reason in (reply.report.speculation_disabled or "")
    assert all(max(prompt) < pair.tokenizer.size for prompt, _ in pair.target.requests)


def test_a_draft_that_ends_at_once_is_no_reply() -> None:
    reply = Pair(STEPS, []).run(ALL)
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 0


@dataclass
class OddVerifier:
    """Answers with something that is no verdict."""

    answer: object

    async def verify(self, pair: StepPair) -> Verdict:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize("answer", [None, True, Verdict(True, "score", math.nan)])
def test_an_answer_that_is_no_verdict_ends_the_speculation(answer: object) -> None:
    reply = Pair(STEPS, STEPS).run(OddVerifier(answer))
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 0
    assert reply.report.speculation_disabled is not None


def test_a_target_that_fails_as_judge_still_writes() -> None:
    pair = Pair(STEPS, STEPS, logprobs={})
    reply = pair.run(ScoreVerifier(pair.target, 5))
    assert reply.text == "".join(STEPS)
    assert reply.report.speculation_disabled is not None


def test_time_in_which_nothing_worked_is_waiting() -> None:
    reply = Pair(STEPS, STEPS).run(ALL)
    assert reply.report.seconds["waiting"] == pytest.approx(0)


def test_the_time_of_a_reply_is_that_of_its_prompt_and_of_its_writing() -> None:
    seconds = Pair(STEPS, STEPS).run(ALL).report.seconds
    assert 0 < seconds["prompt"] < seconds["total"]
    assert seconds["prompt"] + seconds["writing"] == pytest.approx(seconds["total"])
    assert 0 < seconds["draft_prompt"] < seconds["draft"]
    assert seconds["draft_prompt"] + seconds["draft_writing"] == pytest.approx(seconds["draft"])


@dataclass
class Case:
    """Two models, a verifier, and what goes wrong with them."""

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
def written(draw: st.DrawFn, faults: bool) -> Steps:
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
    target = draw(written(faults=False))
    draft = target if draw(st.booleans()) else draw(written(faults=True))
    how = draw(st.sampled_from(["exact", "all", "none", "odd", "fails", "hangs"]))
    seconds = draw(SECONDS)
    verifier: object = {
        "exact": ExactVerifier(),
        "all": ScriptedVerifier(lambda d, t: True, seconds),
        "none": ScriptedVerifier(lambda d, t: False, seconds),
        "odd": ScriptedVerifier(lambda d, t: len(d) % 2 == 1, seconds),
        "fails": ScriptedVerifier(lambda d, t: True, seconds, error="judge is away"),
        "hangs": ScriptedVerifier(lambda d, t: True, 1e9),
    }[how]
    return Case(
        target,
        draft,
        draw(written(faults=True)),
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
        lossless=how in ("exact", "none"),
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
        known = {step.text.strip() for steps in scripts for step in steps if isinstance(step, ScriptedStep)}
        assert {part.strip() for part in reply.text.split("\n\n")} <= known | {""}, "whole steps, as they were written"


@given(case=cases())
@settings(max_examples=600)
def test_whatever_happens_the_reply_is_whole_and_nothing_is_left(case: Case) -> None:
    hold_guarantees(case)
