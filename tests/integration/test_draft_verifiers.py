"""Verifiers on the tiny pair: likelihoods, and a draft tree."""

from __future__ import annotations

from lookahead_agent import ChatLookahead
from tests.integration.tiny_models import questions

QUESTION = questions(1, seed=41)[0]


def test_likelihood_verifier_accepts_draft_steps(tiny: ChatLookahead) -> None:
    metadata = tiny.invoke(QUESTION, policy="likelihood:likelihood=-50").response_metadata["lookahead"]
    assert metadata["speculation_disabled"] is None
    assert metadata["accepted"] > 0
    assert metadata["judge_calls"] >= metadata["accepted"]
    with_defaults = tiny.invoke(QUESTION, policy="likelihood:depth=1", max_tokens=16)
    assert with_defaults.response_metadata["lookahead"]["speculation_disabled"] is None


def test_draft_tree_drops_one_of_two_candidates(tiny: ChatLookahead) -> None:
    # The models decide whether steps are equivalent, so this verifier accepts every pair.
    # Synchronous: the target waits for a draft that is as slow as itself.
    policy = "random:probability=1:width=2:depth=2:synchronous=true"
    metadata = tiny.invoke(QUESTION, policy=policy).response_metadata["lookahead"]
    assert metadata["speculation_disabled"] is None
    assert metadata["accepted"] > 0
    token_counts = metadata["tokens"]["draft"]
    assert token_counts["rejected"] + token_counts["aborted"] > 0, "one of two candidates is dropped"
