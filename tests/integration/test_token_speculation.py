"""Token-level speculation inside steps, on real vLLM: lossless by itself, and together with lookahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookahead_agent import ChatLookahead
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import questions

ASKED = questions(12, seed=21)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "guided"])
def test_replies_stay_the_targets(tiny: ChatLookahead, tiny_pair: tuple[Path, Path], method: str) -> None:
    alone = [message.response_metadata["token_ids"] for message in tiny.batch(ASKED, policy="off")]
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        policy="exact",
        temperature=0,
        max_tokens=96,
        token_speculation=method,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
    ) as llm:
        # In rounds the target waits for its draft, so that some of its steps stand on any machine.
        for policy in ("off", "exact", "exact:synchronous=true"):
            replies = [message.response_metadata for message in llm.batch(ASKED, policy=policy)]
            assert [reply["token_ids"] for reply in replies] == alone, policy
        assert sum(reply["lookahead"]["accepted"] for reply in replies) > 0
        assert llm._runtime is not None
        (target,) = (held for held in llm._runtime._held if held.model == tiny_pair[0])
        assert dict(target.arguments)["speculative_config"]["method"] == {"guided": "custom_class"}.get(method, method)
        if method == "guided":
            guessed = [message.response_metadata for message in llm.batch(ASKED, policy="off")]
            assert [reply["token_ids"] for reply in guessed] == alone
            assert sum(reply["lookahead"]["tokens"]["draft"]["guesses"] for reply in guessed) > 0
