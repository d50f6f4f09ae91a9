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


def test_a_draft_that_pauses_under_load(tiny: ChatLookahead, tiny_pair: tuple[Path, Path]) -> None:
    """It guesses for one reply, nothing for four at once, and nothing on top of what it has not read then."""
    few, alone = ASKED[:3], [message.response_metadata["token_ids"] for message in tiny.batch(ASKED, policy="off")]
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        policy="off",
        temperature=0,
        max_tokens=96,
        token_speculation={
            "method": "draft_model",
            "num_speculative_tokens": 2,
            "num_speculative_tokens_per_batch_size": [[1, 3, 2], [4, 32, 0]],
        },
        engine_args=TINY_ENGINE,
        return_token_ids=True,
    ) as llm:

        def passes(question: object, expected: list[int]) -> float:
            """Of a reply that is written alone, for each of its tokens."""
            message = llm.invoke(question)
            assert message.response_metadata["token_ids"] == expected
            return message.response_metadata["lookahead"]["passes"] / len(expected)

        assert passes(ASKED[0], alone[0]) < 0.95, "guessed"
        together = [message.response_metadata for message in llm.batch(ASKED)]
        assert [reply["token_ids"] for reply in together] == alone
        again = [message.response_metadata["token_ids"] for message in llm.batch(few)]
        assert again == alone[:3], "what the draft has not read is not used"
