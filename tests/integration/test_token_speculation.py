"""Token-level speculation inside steps, on real vLLM: lossless by itself, and together with lookahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import background
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.policy import as_policy
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import questions

ASKED = questions(8, seed=21)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "shared_draft"])
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
        assert llm.backend.runtime is not None
        (target,) = (held for held in llm.backend.runtime.launcher.held if held.model == tiny_pair[0])
        assert dict(target.arguments)["speculative_config"]["method"] == {"shared_draft": "custom_class"}.get(
            method, method
        )
        if method == "shared_draft":
            guessed = [message.response_metadata for message in llm.batch(ASKED, policy="off")]
            assert [reply["token_ids"] for reply in guessed] == alone
            assert sum(reply["lookahead"]["tokens"]["draft"]["speculative"] for reply in guessed) > 0


def test_a_draft_that_pauses_under_load(tiny: ChatLookahead, tiny_pair: tuple[Path, Path]) -> None:
    """It guesses for one reply, nothing for four at once, and nothing on top of what it has not read then."""
    *long, unread = [
        question * 12 for question in questions(8, seed=22)
    ]  # whole blocks of a prompt are kept for later requests
    asked = [*ASKED, *long, unread]
    alone = [message.response_metadata["token_ids"] for message in tiny.batch(asked, policy="off")]
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

        async def deltas(question: str, max_tokens: int, *, drafted: bool = True) -> AsyncGenerator[Delta, None]:
            async with llm.backend.engines(as_policy("off")) as engines:
                prompt = engines.target.tokenizer.chat_prompt([{"role": "user", "content": question}])
                sampling = Sampling(max_tokens=max_tokens, temperature=0, drafted=drafted)
                async with aclosing(engines.target.generate(prompt, sampling)) as generated:
                    async for delta in generated:
                        yield delta

        async def passes(question: str, *, drafted: bool = True) -> float:
            """Of a reply that is written alone, for each of its tokens; a slow reader is told of a few at once."""
            told = [delta.token_ids async for delta in deltas(question, 96, drafted=drafted)]
            written = [token for ids in told for token in ids]
            assert written == alone[asked.index(question)]
            return len(told) / len(written)

        async def beside_others(questions: list[str]) -> None:
            """Reads prompts while so many replies are written that the draft pauses."""
            async with AsyncExitStack() as stack:
                others = [await stack.enter_async_context(aclosing(deltas(other, 900))) for other in ASKED]
                await asyncio.gather(*(anext(other) for other in others))
                for question in questions:
                    async for _ in deltas(question, 1):
                        pass
                await asyncio.gather(*(anext(other) for other in others))  # they were there all the time

        assert background.run(passes(long[0])) < 0.6, "guessed"
        together = [message.response_metadata["token_ids"] for message in llm.batch(asked[:8])]
        assert together == alone[:8]
        background.run(beside_others(long[1:-1]))
        for question in long[1:-1]:
            assert background.run(passes(question)) > 0.8, "the draft has not read the prompt, which is not read again"
        assert background.run(passes(long[-1])) < 0.6, "it has read this one"

        assert background.run(passes(unread, drafted=False)) > 0.8, "the target is asked to write alone"
        assert background.run(passes(unread)) > 0.8, "and the draft has not read that prompt"

        sampled = [{"temperature": 0.7, "seed": number} for number in range(6)]
        told = [llm.invoke(ASKED[0], **each).response_metadata for each in sampled]

        async def beside_each_other() -> list[AIMessage]:
            return await asyncio.gather(*(llm.ainvoke(ASKED[0], **each) for each in sampled))

        ids = [message.response_metadata["token_ids"] for message in asyncio.run(beside_each_other())]
        assert ids == [one["token_ids"] for one in told], "a seed fixes a reply whatever runs beside it"
        other = llm.invoke(ASKED[0], temperature=0.7).response_metadata
        assert other["lookahead"]["target_forward_passes"] < len(other["token_ids"]), "without a seed there are guesses"
