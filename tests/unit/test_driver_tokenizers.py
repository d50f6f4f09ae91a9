"""A draft whose tokenizer differs from the target's: the engines exchange the text of steps."""

from __future__ import annotations

import pytest

from lookahead_agent.decoding import DecodingSettings
from lookahead_agent.engines import Sampling
from lookahead_agent.verifiers.exact import ExactVerifier
from lookahead_agent.verifiers.prefilter import PrefilterVerifier
from tests.unit.scripts import Pair, ScriptedVerifier

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
OTHER = ["Firstly this.\n\n", "Then that.\n\n", "So it is 5.\n\n", "Done."]
ACCEPT_ALL = ScriptedVerifier(lambda draft, target: True)


def test_accepted_draft_steps_are_encoded_with_the_targets_tokenizer() -> None:
    pair = Pair(STEPS, OTHER, two_tokenizers=True)
    reply = pair.run(ACCEPT_ALL)
    assert reply.text == "".join(OTHER)
    assert pair.tokenizer.decode(reply.token_ids) == "".join(OTHER)
    assert reply.report.accepted == 4
    assert reply.report.draft_tokens.committed > 0


def test_each_engine_receives_only_tokens_of_its_own_tokenizer() -> None:
    pair = Pair(STEPS, OTHER, two_tokenizers=True)
    pair.run(ScriptedVerifier(lambda draft, target: "5" not in draft))
    assert pair.draft is not None
    for engine, tokenizer in ((pair.target, pair.tokenizer), (pair.draft, pair.draft_tokenizer)):
        for prompt, _ in engine.requests:
            assert tokenizer.decode(prompt).startswith("user: what is it?\nassistant: ")
            reply = tokenizer.decode(prompt).partition("assistant: ")[2]
            assert all(part in {*STEPS, *OTHER} for part in reply.replace("\n\n", "\n\n|").split("|") if part)


def test_exact_is_lossless_with_two_tokenizers() -> None:
    for draft in (STEPS, OTHER):
        pair = Pair(STEPS, draft, two_tokenizers=True)
        alone = Pair(STEPS, None).run()
        reply = pair.run(ExactVerifier())
        assert reply.text == alone.text
    assert reply.report.accepted > 0


def test_prefilter_refutes_a_step_with_another_number_early() -> None:
    long = ["It is 12 and then some more and more and more of it.\n\n", "Done."]
    pair = Pair(long, ["It is 11.\n\n", "Done."], target_seconds=20, two_tokenizers=True)
    reply = pair.run(PrefilterVerifier(ACCEPT_ALL))
    assert reply.report.refuted == 1
    assert reply.text == "".join(long)


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 9, 12])
def test_max_tokens_counts_the_targets_tokens(max_tokens: int) -> None:
    pair = Pair(STEPS, OTHER, two_tokenizers=True)
    reply = pair.run(ACCEPT_ALL, sampling=Sampling(max_tokens=max_tokens))
    assert len(reply.token_ids) == max_tokens
    assert reply.finish_reason == "length"


def test_synchronous_and_tree_decoding_are_lossless_with_two_tokenizers() -> None:
    for settings in (DecodingSettings(synchronous=True), DecodingSettings(width=2)):
        pair = Pair(STEPS, OTHER, two_tokenizers=True, sampled=STEPS)
        assert pair.run(ExactVerifier(), settings).text == "".join(STEPS)
