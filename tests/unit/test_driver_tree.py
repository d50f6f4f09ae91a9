"""Several candidates per position, and verifiers that judge the draft's step by itself."""

from __future__ import annotations

import math

import pytest

from lookahead_agent.decoding import DecodingSettings
from lookahead_agent.engines import Sampling, ScriptedStep
from lookahead_agent.verifiers.exact import ExactVerifier
from lookahead_agent.verifiers.likelihood import LikelihoodVerifier
from lookahead_agent.verifiers.score import PROMPT, ScoreVerifier
from tests.unit.scripts import Pair, ScriptedVerifier

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
OTHER = ["Firstly this.\n\n", "Thereafter that.\n\n", "Thus it is 4.\n\n", "Finished."]


def test_a_second_candidate_is_kept_where_the_first_is_refused() -> None:
    pair = Pair(STEPS, OTHER, sampled=STEPS)
    reply = pair.run(ExactVerifier(), DecodingSettings(width=2))
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 4
    assert reply.report.seconds["total"] < 12
    narrow = Pair(STEPS, OTHER, sampled=STEPS).run(ExactVerifier(), DecodingSettings(width=1))
    assert narrow.report.accepted == 0


def test_the_first_accepted_candidate_is_kept_and_the_others_are_dropped() -> None:
    pair = Pair(STEPS, OTHER, sampled=[ScriptedStep(f"Again {step}", 2.0) for step in STEPS])
    reply = pair.run(ScriptedVerifier(lambda draft, target: True), DecodingSettings(width=2))
    assert reply.text == "".join(OTHER), "both would do, and the first was there first"
    assert reply.report.draft_tokens.rejected + reply.report.draft_tokens.aborted > 0


def test_candidates_that_say_the_same_are_dropped() -> None:
    pair = Pair(STEPS, OTHER, sampled=OTHER)
    calls: list[str] = []
    pair.run(ScriptedVerifier(lambda draft, target: not calls.append(draft)), DecodingSettings(width=2))
    assert len(calls) == len(set(calls)) == 4


def test_branches_are_followed_by_the_target() -> None:
    """The second candidate's successor is written by the target before the candidate is accepted."""
    pair = Pair(STEPS, OTHER, target_seconds=10, sampled=STEPS)
    pair.run(ExactVerifier(), DecodingSettings(width=2, depth=2))
    prefixes = {pair.tokenizer.decode(prompt[len(pair.prompt) :]) for prompt, _ in pair.target.requests}
    assert {OTHER[0], STEPS[0]} <= prefixes


@pytest.mark.parametrize("seed", [None, 7])
def test_later_candidates_of_a_greedy_reply_are_sampled_repeatably(seed: int | None) -> None:
    def sampled(temperature: float) -> list[tuple[float, int | None]]:
        pair = Pair(STEPS, OTHER, sampled=STEPS)
        settings = DecodingSettings(width=3, draft_temperature=temperature)
        pair.run(ScriptedVerifier(lambda d, t: False), settings, Sampling(max_tokens=1000, seed=seed))
        assert pair.draft is not None
        return [(sampling.temperature, sampling.seed) for _, sampling in pair.draft.requests if sampling.temperature]

    assert {temperature for temperature, _ in sampled(0.9)} == {0.9}
    seeds = [seed for _, seed in sampled(0.9)]
    assert None not in seeds
    assert len(set(seeds)) == 2 * 4, "one for each rank and position"
    assert seeds == [seed for _, seed in sampled(0.9)]


def test_each_candidate_of_a_seeded_reply_has_a_seed_of_its_own() -> None:
    pair = Pair(STEPS, STEPS, sampled=STEPS)
    pair.run(ExactVerifier(), DecodingSettings(width=2), Sampling(max_tokens=1000, temperature=0.7, seed=3))
    assert pair.draft is not None
    of_target = {prompt: sampling.seed for prompt, sampling in pair.target.requests}
    for prompt in {prompt for prompt, _ in pair.draft.requests}:
        seeds = [sampling.seed for other, sampling in pair.draft.requests if other == prompt]
        assert len(set(seeds)) == len(seeds) == 2
        assert prompt not in of_target or of_target[prompt] in seeds


def marks(mark: int) -> dict[str, float]:
    return {str(digit): math.log(0.98 if digit == mark else 0.02 / 9) for digit in range(10)}


@pytest.mark.parametrize("depth", [1, 4])
def test_specreason_has_the_target_write_only_what_it_marks_too_low(depth: int) -> None:
    pair = Pair(STEPS, OTHER, logprobs=marks(8))
    reply = pair.run(ScoreVerifier(pair.target, 7.0), DecodingSettings(depth=depth))
    assert reply.text == "".join(OTHER)
    assert reply.report.target_tokens.generated == 0
    assert reply.report.judge_calls == 4
    pair = Pair(STEPS, OTHER, logprobs=marks(8))
    reply = pair.run(ScoreVerifier(pair.target, 8.5), DecodingSettings(depth=depth))
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 0


def test_the_mark_is_asked_for_after_the_reply_so_far() -> None:
    pair = Pair(STEPS, OTHER, logprobs=marks(8))
    pair.run(ScoreVerifier(pair.target, 7.0), DecodingSettings(depth=1))
    asked = [pair.tokenizer.decode(prompt) for prompt, sampling in pair.target.requests if sampling.logprobs]
    assert asked[1] == "user: what is it?\nassistant: " + "".join(OTHER[:2]) + f"\nuser: {PROMPT}\nassistant: "


def test_a_target_that_gives_no_mark_ends_the_speculation() -> None:
    pair = Pair(STEPS, OTHER, logprobs={"maybe": -0.1})
    reply = pair.run(ScoreVerifier(pair.target, 7.0))
    assert reply.text == "".join(STEPS)
    assert reply.report.speculation_disabled == "the target marked the draft's step with no digit"


def test_likelihood_is_the_mean_over_the_drafts_tokens() -> None:
    likely = {"Firstly": -0.1, " this": -0.2, ".": -0.3, "\n\n": -0.4}
    pair = Pair(STEPS, OTHER, logprobs=likely)
    reply = pair.run(LikelihoodVerifier(pair.target, -0.25 - 1e-9))
    assert reply.text == OTHER[0] + "".join(STEPS[1:])
    pair = Pair(STEPS, OTHER, logprobs=likely)
    assert pair.run(LikelihoodVerifier(pair.target, -0.2)).text == "".join(STEPS)


def test_a_cut_draft_step_is_not_even_judged() -> None:
    pair = Pair(STEPS, ["one two three four five six seven\n\n", "end."], logprobs=marks(9))
    reply = pair.run(ScoreVerifier(pair.target, 1.0), DecodingSettings(max_step_tokens=5, depth=1))
    assert "one" not in reply.text


def test_a_draft_that_ends_the_reply_without_a_word_is_not_marked() -> None:
    pair = Pair(STEPS, OTHER[:1], logprobs=marks(9))
    reply = pair.run(ScoreVerifier(pair.target, 1.0), DecodingSettings(depth=2))
    assert reply.text == OTHER[0] + "".join(STEPS[1:])
