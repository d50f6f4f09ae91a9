"""A draft with another tokenizer, on real vLLM: the engines exchange the text of steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lookahead_agent import ChatLookahead
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import make_other_draft, questions

QUESTIONS = questions(8, seed=51)


@pytest.fixture(scope="module")
def mixed(
    tiny: ChatLookahead, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatLookahead]:
    """The tiny target, with the engine of `tiny`, and the other draft."""
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(make_other_draft(tmp_path_factory.mktemp("other") / "draft")),
        policy="exact",
        depth=4,
        token_speculation="none",
        temperature=0,
        max_tokens=40,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
    ) as llm:
        llm.start()
        yield llm


def test_steps_of_a_draft_with_another_tokenizer_are_retokenized(mixed: ChatLookahead) -> None:
    # Accepting everything shows that the draft's text arrives whole, in the target's tokens.
    # The synchronous target waits for its draft, so some draft steps are accepted on any machine.
    engines = mixed.backend.running
    assert engines is not None
    assert engines.draft is not None
    assert engines.draft.tokenizer.fingerprint != engines.target.tokenizer.fingerprint
    accepted = 0
    for question in QUESTIONS:
        message = mixed.invoke(question, policy="random:probability=1:synchronous=true")
        metadata = message.response_metadata["lookahead"]
        assert metadata["speculation_disabled"] is None
        assert engines.target.tokenizer.decode(message.response_metadata["token_ids"]) == message.text
        accepted += metadata["accepted"]
    assert accepted > 0


def test_exact_is_lossless_with_another_tokenizer(mixed: ChatLookahead) -> None:
    ids = {
        policy: [message.response_metadata["token_ids"] for message in mixed.batch(QUESTIONS, policy=policy)]
        for policy in ("off", "exact", "exact:synchronous=true")
    }
    assert ids["off"] == ids["exact"] == ids["exact:synchronous=true"]
