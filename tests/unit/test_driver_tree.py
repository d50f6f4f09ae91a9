"""Several candidates per position, and verifiers that judge a draft step without a target step."""

from __future__ import annotations

import math

import pytest

from lookahead_agent.decoding import DecodingSettings
from lookahead_agent.engines import Sampling, ScriptedStep
from lookahead_agent.verifiers.model_free import ExactVerifier
from lookahead_agent.verifiers.scores import PROMPT, LikelihoodVerifier, ScoreVerifier
from tests.unit.scripts import Pair, ScriptedVerifier

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
OTHER = ["Firstly this.\n\n", "Thereafter that.\n\n", "Thus it is 4.\n\n", "Finished."]


def test_second_candidate_is_accepted_if_the_first_is_rejected() -> None:
    pair = Pair(STEPS, OTHER, sampled=STEPS)
    reply = pair.run(ExactVerifier(), DecodingSettings(width=2))
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 4
    assert reply.report.seconds["total"] < 12
    narrow = Pair(STEPS, OTHER, sampled=STEPS).run(ExactVerifier(), DecodingSettings(width=1))
    assert narrow.report.accepted == 0


def test_first_accepted_candidate_is_committed_and_the_others_are_discarded() -> None:
    pair = Pair(STEPS, OTHER, sampled=[ScriptedStep(f"Again {step}", 2.0) for step in STEPS])
    reply = pair.run(ScriptedVerifier(lambda draft, target: True), DecodingSettings(width=2))
    assert reply.text == "".join(OTHER), "both are acceptable, and the first arrived first"
    assert reply.report.draft_tokens.rejected + reply.report.draft_tokens.aborted > 0


def test_duplicate_candidates_are_judged_once() -> None:
    pair = Pair(STEPS, OTHER, sampled=OTHER)
    calls: list[str] = []
    pair.run(ScriptedVerifier(lambda draft, target: not calls.append(draft)), DecodingSettings(width=2))
    assert len(calls) == len(set(calls)) == 4


def test_target_continues_every_branch() -> None:
    """The target writes the step after the second candidate before that candidate is accepted."""
    pair = Pair(STEPS, OTHER, target_seconds=10, sampled=STEPS)
    pair.run(ExactVerifier(), DecodingSettings(width=2, depth=2))
    prefixes = {pair.tokenizer.decode(prompt[len(pair.prompt) :]) for prompt, _ in pair.target.requests}
    assert {OTHER[0], STEPS[0]} <= prefixes


@pytest.mark.parametrize("seed", [None, 7])
def test_later_candidates_of_a_greedy_reply_are_sampled_reproducibly(seed: int | None) -> None:
    def sampled(temperature: float) -> list[tuple[float, int | None]]:
        pair = Pair(STEPS, OTHER, sampled=STEPS)
        settings = DecodingSettings(width=3, draft_temperature=temperature)
        pair.run(ScriptedVerifier(lambda d, t: False), settings, Sampling(max_tokens=1000, seed=seed))
        assert pair.draft is not None
        return [(sampling.temperature, sampling.seed) for _, sampling in pair.draft.requests if sampling.temperature]

    assert {temperature for temperature, _ in sampled(0.9)} == {0.9}
    seeds = [seed for _, seed in sampled(0.9)]
    assert None not in seeds
    assert len(set(seeds)) == 2 * 4, "one seed per rank and position"
    assert seeds == [seed for _, seed in sampled(0.9)]


def test_each_candidate_of_a_seeded_reply_has_its_own_seed() -> None:
    pair = Pair(STEPS, STEPS, sampled=STEPS)
    pair.run(ExactVerifier(), DecodingSettings(width=2), Sampling(max_tokens=1000, temperature=0.7, seed=3))
    assert pair.draft is not None
    target_seeds = {prompt: sampling.seed for prompt, sampling in pair.target.requests}
    for prompt in {prompt for prompt, _ in pair.draft.requests}:
        seeds = [sampling.seed for other, sampling in pair.draft.requests if other == prompt]
        assert len(set(seeds)) == len(seeds) == 2
        assert prompt not in target_seeds or target_seeds[prompt] in seeds


def score_logprobs(score: int) -> dict[str, float]:
    return {str(digit): math.log(0.98 if digit == score else 0.02 / 9) for digit in range(10)}


@pytest.mark.parametrize("depth", [1, 4])
def test_specreason_target_writes_only_steps_that_it_scores_below_the_threshold(depth: int) -> None:
    pair = Pair(STEPS, OTHER, logprobs=score_logprobs(8))
    reply = pair.run(ScoreVerifier(pair.target, 7.0), DecodingSettings(depth=depth))
    assert reply.text == "".join(OTHER)
    assert reply.report.target_tokens.total == 0
    assert reply.report.judge_calls == 4
    pair = Pair(STEPS, OTHER, logprobs=score_logprobs(8))
    reply = pair.run(ScoreVerifier(pair.target, 8.5), DecodingSettings(depth=depth))
    assert reply.text == "".join(STEPS)
    assert reply.report.accepted == 0


def test_score_prompt_follows_the_reply_so_far() -> None:
    pair = Pair(STEPS, OTHER, logprobs=score_logprobs(8))
    pair.run(ScoreVerifier(pair.target, 7.0), DecodingSettings(depth=1))
    prompts = [pair.tokenizer.decode(prompt) for prompt, sampling in pair.target.requests if sampling.logprobs]
    assert prompts[1] == "user: what is it?\nassistant: " + "".join(OTHER[:2]) + f"\nuser: {PROMPT}\nassistant: "


def test_missing_score_disables_speculation() -> None:
    pair = Pair(STEPS, OTHER, logprobs={"maybe": -0.1})
    reply = pair.run(ScoreVerifier(pair.target, 7.0))
    assert reply.text == "".join(STEPS)
    assert reply.report.speculation_disabled == "the score was not a digit"


def test_likelihood_is_the_mean_logprob_of_the_drafts_tokens() -> None:
    by_token = {"Firstly": -0.1, " this": -0.2, ".": -0.3, "\n\n": -0.4}
    pair = Pair(STEPS, OTHER, logprobs=by_token)
    reply = pair.run(LikelihoodVerifier(pair.target, -0.25 - 1e-9))
    assert reply.text == OTHER[0] + "".join(STEPS[1:])
    pair = Pair(STEPS, OTHER, logprobs=by_token)
    assert pair.run(LikelihoodVerifier(pair.target, -0.2)).text == "".join(STEPS)


def test_truncated_draft_step_is_rejected_unjudged() -> None:
    pair = Pair(STEPS, ["one two three four five six seven\n\n", "end."], logprobs=score_logprobs(9))
    reply = pair.run(ScoreVerifier(pair.target, 1.0), DecodingSettings(max_step_tokens=5, depth=1))
    assert reply.text == STEPS[0] + "end."
    assert reply.report.verifier_calls == 1, "only the second step is judged"


def test_empty_draft_step_that_ends_the_reply_is_rejected_unjudged() -> None:
    pair = Pair(STEPS, OTHER[:1], logprobs=score_logprobs(9))
    reply = pair.run(ScoreVerifier(pair.target, 1.0), DecodingSettings(depth=2))
    assert reply.text == OTHER[0] + "".join(STEPS[1:])
    assert reply.report.verifier_calls == 1, "only the first step is judged"
