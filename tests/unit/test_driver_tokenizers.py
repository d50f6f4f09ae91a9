"""A draft with another tokenizer than the target's: text is exchanged where steps end."""

from __future__ import annotations

import pytest

from lookahead_agent.decoding import DecodingSettings
from lookahead_agent.engines import Sampling
from lookahead_agent.verifiers.exact import ExactVerifier
from lookahead_agent.verifiers.prefilter import PrefilterVerifier
from tests.unit.scripts import Pair, ScriptedVerifier

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
OTHER = ["Firstly this.\n\n", "Then that.\n\n", "So it is 5.\n\n", "Done."]
ALL = ScriptedVerifier(lambda draft, target: True)


def test_the_drafts_words_arrive_in_the_targets_tokens() -> None:
    pair = Pair(STEPS, OTHER, two_tokenizers=True)
    reply = pair.run(ALL)
    assert reply.text == "".join(OTHER)
    assert pair.tokenizer.decode(reply.token_ids) == "".join(OTHER)
    assert reply.report.accepted == 4
    assert reply.report.draft_tokens.committed > 0


def test_each_engine_sees_its_own_tokens_only() -> None:
    pair = Pair(STEPS, OTHER, two_tokenizers=True)
    pair.run(ScriptedVerifier(lambda draft, target: "5" not in draft))
    assert pair.draft is not None
    for engine, tokenizer in ((pair.target, pair.tokenizer), (pair.draft, pair.draft_tokenizer)):
        for prompt, _ in engine.requests:
            assert tokenizer.decode(prompt).startswith("user: what is it?\nassistant: ")
            reply = tokenizer.decode(prompt).partition("assistant: ")[2]
            assert all(part in {*STEPS, *OTHER} for part in reply.replace("\n\n", "\n\n|").split("|") if part)


def test_exact_is_lossless_all_the_same() -> None:
    for draft in (STEPS, OTHER):
        pair = Pair(STEPS, draft, two_tokenizers=True)
        alone = Pair(STEPS, None).run()
        reply = pair.run(ExactVerifier())
        assert reply.text == alone.text
    assert reply.report.accepted > 0


def test_numbers_still_refute_early() -> None:
    long = ["It is 12 and then some more and more and more of it.\n\n", "Done."]
    pair = Pair(long, ["It is 11.\n\n", "Done."], target_seconds=20, two_tokenizers=True)
    reply = pair.run(PrefilterVerifier(ALL))
    assert reply.report.refuted == 1
    assert reply.text == "".join(long)


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 9, 12])
def test_the_token_budget_counts_the_targets_tokens(max_tokens: int) -> None:
    pair = Pair(STEPS, OTHER, two_tokenizers=True)
    reply = pair.run(ALL, sampling=Sampling(max_tokens=max_tokens))
    assert len(reply.token_ids) == max_tokens
    assert reply.finish_reason == "length"


def test_in_rounds_and_in_a_tree() -> None:
    for settings in (DecodingSettings(synchronous=True), DecodingSettings(width=2)):
        pair = Pair(STEPS, OTHER, two_tokenizers=True, sampled=STEPS)
        assert pair.run(ExactVerifier(), settings).text == "".join(STEPS)
