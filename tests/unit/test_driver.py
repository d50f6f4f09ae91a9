"""The decoder on scripted engines in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from lookahead_agent.decoding import DecodingSettings, lookahead
from lookahead_agent.engines import Sampling, ScriptedStep
from lookahead_agent.errors import EngineError
from lookahead_agent.verifiers.model_free import ExactVerifier
from tests.unit.scripts import Pair, ScriptedVerifier
from tests.virtual_time import run_in_virtual_time

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
ACCEPT_ALL = ScriptedVerifier(lambda draft, target: True)
REJECT_ALL = ScriptedVerifier(lambda draft, target: False)


def test_target_alone_writes_its_script_and_streams_every_token() -> None:
    pair = Pair(STEPS, None)
    reply = pair.run()
    assert reply.text == "".join(STEPS)
    assert reply.finish_reason == "stop"
    assert reply.report.steps == 4
    assert reply.report.acceptance_rate == 0
    assert len(pair.pieces) > len(STEPS), "the target alone streams token by token"
    assert len(pair.target.requests) == 1, "one request generates the whole reply"
    assert reply.report.seconds["total"] == pytest.approx(12)


def test_identical_draft_is_accepted_throughout_and_saves_time() -> None:
    pair = Pair(STEPS, STEPS)
    reply = pair.run()
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == reply.report.steps == 4
    # The draft takes 1 s per step. The last target step follows three draft steps and takes 3 s.
    assert reply.report.seconds["total"] == pytest.approx(6)
    assert reply.report.seconds["target"] == pytest.approx(6)
    assert reply.report.seconds["draft"] == pytest.approx(4)


def test_each_committed_step_streams_as_one_delta() -> None:
    pair = Pair(STEPS, STEPS)
    pair.run()
    assert pair.pieces == STEPS


def test_accepted_steps_keep_the_drafts_text() -> None:
    paraphrased = ["Firstly this.\n\n", "Thereafter that.\n\n", "Thus it is 4.\n\n", "Finished."]
    assert Pair(STEPS, paraphrased).run(ACCEPT_ALL).text == "".join(paraphrased)


def test_rejected_steps_are_replaced_by_the_targets() -> None:
    paraphrased = ["Firstly this.\n\n", "Thereafter that.\n\n", "Thus it is 4.\n\n", "Finished."]
    pair = Pair(STEPS, paraphrased)
    reply = pair.run(REJECT_ALL)
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 0
    assert reply.report.target_tokens.rejected == 0
    assert reply.report.draft_tokens.committed == 0


def test_hedging_keeps_the_targets_speed_if_every_step_is_rejected() -> None:
    paraphrased = ["Firstly this.\n\n", "Thereafter that.\n\n", "Thus it is 4.\n\n", "Finished."]
    slow_reject = ScriptedVerifier(lambda draft, target: False, seconds=2.0)
    hedged = Pair(STEPS, paraphrased).run(slow_reject, DecodingSettings(hedge=True))
    unhedged = Pair(STEPS, paraphrased).run(slow_reject, DecodingSettings(hedge=False))
    alone = Pair(STEPS, None).run()
    # Hedging cannot hide the verdict on the last step, because no step follows it.
    assert hedged.report.seconds["total"] <= alone.report.seconds["total"] + 2.0
    assert unhedged.report.seconds["total"] == pytest.approx(alone.report.seconds["total"] + 4 * 2.0)


def test_steps_with_mixed_verdicts_commit_in_order() -> None:
    paraphrased = ["Firstly this.\n\n", "Then that.\n\n", "So it is 5.\n\n", "Done."]
    verifier = ScriptedVerifier(lambda draft, target: "5" not in draft, seconds=0.5)
    reply = Pair(STEPS, paraphrased).run(verifier)
    assert reply.text == "Firstly this.\n\nThen that.\n\nSo it is 4.\n\nDone."
    assert reply.report.accepted == 3


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_depth_limits_target_steps_in_flight(depth: int) -> None:
    steps = [f"Step {i}.\n\n" for i in range(8)]
    pair = Pair(steps, steps, target_seconds=100, draft_seconds=1)
    peak = 0

    async def record_peak() -> None:
        nonlocal peak
        reply = asyncio.create_task(pair.reply(settings=DecodingSettings(depth=depth)))
        while not reply.done():
            peak = max(peak, pair.target.in_flight)
            await asyncio.sleep(0.5)
        await reply

    run_in_virtual_time(record_peak())
    assert peak == depth


def test_steps_truncated_by_max_step_tokens_are_never_accepted() -> None:
    steps = ["one two three four five six\n\n", "end."]
    reply = Pair(steps, steps).run(ACCEPT_ALL, DecodingSettings(max_step_tokens=4))
    assert reply.text == "".join(steps)
    # The draft can contribute only the complete remainders of steps.
    assert reply.report.draft_tokens.committed < len(reply.token_ids)


def test_a_step_is_rejected_if_only_one_model_ends_the_reply() -> None:
    reply = Pair(STEPS, ["First this."]).run(ACCEPT_ALL)
    assert reply.text.startswith("First this.\n\n")
    assert len(reply.text) > len("First this.\n\n")


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 11])
@pytest.mark.parametrize("draft", [None, STEPS, ["Else.\n\n", "Other.\n\n", "More.\n\n"]])
def test_a_truncated_reply_has_exactly_max_tokens(max_tokens: int, draft: list[str] | None) -> None:
    reply = Pair(STEPS, draft).run(sampling=Sampling(max_tokens=max_tokens))
    assert len(reply.token_ids) == max_tokens
    assert reply.finish_reason == "length"
    assert "".join(STEPS).startswith(reply.text)


@pytest.mark.parametrize("stop", ["that", "that.\n\nSo", "4"])
@pytest.mark.parametrize("draft", [None, STEPS])
def test_stop_strings_end_the_reply_and_are_excluded_from_it(stop: str, draft: list[str] | None) -> None:
    pair = Pair(STEPS, draft)
    reply = pair.run(sampling=Sampling(max_tokens=1000, stop=(stop,)))
    assert reply.text == "".join(STEPS).split(stop)[0]
    assert reply.finish_reason == "stop"


def test_a_step_that_ends_at_a_stop_string_matches_one_that_ends_the_reply() -> None:
    steps = ["First this.\n\n", "It is 6 * 20"]
    draft = ["First this.\n\n", "It is 20 * 6 = 120"]
    sampling = Sampling(max_tokens=1000, stop=("=",))
    for first, second in ((steps, draft), (draft, steps)):
        reply = Pair(first, second).run(ACCEPT_ALL, sampling=sampling)
        assert reply.report.accepted == 2
        assert reply.text.strip() == "".join(second).split("=")[0].strip()
        assert reply.finish_reason == "stop"
        assert Pair(first, second).run(ExactVerifier(), sampling=sampling).text == "".join(first).split("=")[0]


def test_no_draft_token_is_committed_inside_an_action() -> None:
    steps = ["I need a tool.\n\n", '<tool_call>\n{"name": "x",\n\n"arguments": {}}\n</tool_call>']
    pair = Pair(steps, steps)
    reply = pair.run(ACCEPT_ALL, markers=("<tool_call>",))
    assert reply.text == "".join(steps)
    committed_by_draft = pair.tokenizer.encode(steps[0])
    assert reply.report.draft_tokens.committed == len(committed_by_draft)


def test_failed_draft_disables_speculation() -> None:
    broken = [ScriptedStep("First this.\n\n", 1), ScriptedStep("Then", 1, error="out of memory")]
    reply = Pair(STEPS, broken).run(ACCEPT_ALL)
    assert reply.text == "".join(STEPS)
    assert reply.report.speculation_disabled == "out of memory"


def test_failed_verifier_disables_speculation() -> None:
    reply = Pair(STEPS, STEPS).run(ScriptedVerifier(lambda d, t: True, error="judge is away"))
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 0
    assert reply.report.speculation_disabled == "judge is away"


def test_hanging_verifier_times_out_and_disables_speculation() -> None:
    reply = Pair(STEPS, STEPS).run(
        ScriptedVerifier(lambda d, t: True, seconds=1e6), DecodingSettings(verifier_timeout=5)
    )
    assert reply.text == "".join(STEPS)
    assert reply.report.speculation_disabled == "the verifier timed out after 5 s"


def test_hanging_draft_does_not_delay_the_target() -> None:
    reply = Pair(STEPS, [ScriptedStep("First", 1, hangs=True)] * 4).run(ACCEPT_ALL)
    assert reply.text == "".join(STEPS)
    assert reply.report.seconds["total"] == pytest.approx(12)


def test_failed_target_fails_the_reply_and_leaves_no_request() -> None:
    broken = [ScriptedStep("First this.\n\n", 1), ScriptedStep("Then", 1, error="out of memory")]
    pair = Pair(broken, STEPS)
    with pytest.raises(EngineError, match="out of memory"):
        pair.run(ACCEPT_ALL)
    assert pair.target.in_flight == 0
    assert pair.draft is not None
    assert pair.draft.in_flight == 0


@pytest.mark.parametrize("after", [0.0, 0.5, 1.0, 1.5, 2.9, 3.0, 3.3, 4.7, 6.1, 8.0])
@pytest.mark.parametrize("verdict", [True, False])
def test_cancellation_at_any_time_leaves_no_request(after: float, verdict: bool) -> None:
    pair = Pair(STEPS, ["Firstly.\n\n", "Then that.\n\n", "So.\n\n", "Done."])
    verifier = ScriptedVerifier(lambda d, t: verdict, seconds=0.4)

    async def cancel_reply() -> None:
        task = asyncio.create_task(
            lookahead(pair.request(), pair.target, pair.draft, verifier, DecodingSettings(depth=3))
        )
        await asyncio.sleep(after)
        task.cancel()
        if not task.done():
            with pytest.raises(asyncio.CancelledError):
                await task
        assert pair.draft is not None
        assert pair.target.in_flight == pair.draft.in_flight == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(cancel_reply())


def test_draft_and_target_share_one_seed_per_sampled_step() -> None:
    pair = Pair(STEPS, STEPS)
    pair.run(sampling=Sampling(max_tokens=1000, temperature=0.7, seed=3))
    assert pair.draft is not None
    seeds = {prompt: sampling.seed for prompt, sampling in pair.target.requests}
    assert len(set(seeds.values())) == 4, "one seed per position"
    for prompt, sampling in pair.draft.requests:
        assert sampling.seed == seeds[prompt]


def test_target_uses_the_same_seeds_with_and_without_a_draft() -> None:
    sampling = Sampling(max_tokens=1000, temperature=0.7, seed=3)
    alone, pair = Pair(STEPS, None), Pair(STEPS, STEPS)
    alone.run(sampling=sampling)
    pair.run(ExactVerifier(), sampling=sampling)
    seeds = {pair.tokenizer.decode(prompt): sampling.seed for prompt, sampling in pair.target.requests}
    for prompt, used in alone.target.requests:
        assert used.seed == seeds[alone.tokenizer.decode(prompt)]


def test_early_rejection_saves_tokens_and_leaves_the_reply_unchanged() -> None:
    target = ["First this and that and more.\n\n", "Then that and this and more.\n\n", "Done."]
    draft = ["First of all we begin.\n\n", "Then that and this and more.\n\n", "Done."]
    replies = {}
    for early in (True, False):
        replies[early] = Pair(target, draft).run(ExactVerifier(), DecodingSettings(early=early))
    assert replies[True].token_ids == replies[False].token_ids
    assert replies[True].report.refuted == 1
    assert replies[False].report.refuted == 0
    assert replies[True].report.draft_tokens.total < replies[False].report.draft_tokens.total
    assert replies[True].report.target_tokens.total < replies[False].report.target_tokens.total
    assert replies[True].report.seconds["total"] <= replies[False].report.seconds["total"]


@pytest.mark.parametrize("tokens_per_delta", [1, 4])
def test_a_complete_draft_step_is_dropped_once_at_the_token_that_contradicts_it(tokens_per_delta: int) -> None:
    target = ["First this and that and more of it.\n\n", "Done."]
    draft = ["First this and that and less of it.\n\n", "Done."]
    reply = Pair(target, draft, tokens_per_delta=tokens_per_delta).run(ExactVerifier())
    assert reply.text == "".join(target)
    assert reply.report.refuted == 1
    assert reply.report.verifier_calls == reply.report.accepted, "it is not asked about a step that is dropped"
