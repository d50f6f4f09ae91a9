"""Token speculation inside steps, on real vLLM: lossless alone, and together with lookahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.policy import as_policy
from lookahead_agent.system import background
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import questions

QUESTIONS = questions(8, seed=21)


def assert_lossless(llm: ChatLookahead, target_ids: list[list[int]]) -> None:
    """Compare the replies to `QUESTIONS` with the target's, without and with draft steps."""
    # The synchronous target waits for its draft, so some draft steps are accepted on any machine.
    for policy in ("off", "exact", "exact:synchronous=true"):
        replies = [message.response_metadata for message in llm.batch(QUESTIONS, policy=policy)]
        assert [reply["token_ids"] for reply in replies] == target_ids, policy
    assert sum(reply["lookahead"]["accepted"] for reply in replies) > 0


def method_of(llm: ChatLookahead, target: Path) -> str:
    """vLLM's name for the target's token speculation."""
    assert llm.backend.runtime is not None
    (config,) = (held for held in llm.backend.runtime.launcher.held if held.model == target)
    method: str = dict(config.arguments)["speculative_config"]["method"]
    return method


@pytest.mark.parametrize(("method", "name"), [("ngram", "ngram"), ("shared_draft", "custom_class")])
def test_token_speculation_is_lossless(
    tiny: ChatLookahead, tiny_pair: tuple[Path, Path], method: str, name: str
) -> None:
    target_ids = [message.response_metadata["token_ids"] for message in tiny.batch(QUESTIONS, policy="off")]
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        policy="exact",
        depth=4,  # else the target would be started once alone and once beside the draft
        temperature=0,
        max_tokens=96,
        token_speculation=method,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
    ) as llm:
        assert_lossless(llm, target_ids)
        assert method_of(llm, tiny_pair[0]) == name
        replies = [message.response_metadata["lookahead"] for message in llm.batch(QUESTIONS, policy="off")]
        assert all(reply["accepted_tokens"] <= reply["proposed_tokens"] for reply in replies)
        assert sum(reply["accepted_tokens"] for reply in replies) > 0, "vLLM counts them"
        if method == "shared_draft":
            speculative = [message.response_metadata for message in llm.batch(QUESTIONS, policy="off")]
            assert [reply["token_ids"] for reply in speculative] == target_ids
            assert sum(reply["lookahead"]["tokens"]["draft"]["speculative"] for reply in speculative) > 0


def test_draft_model_is_lossless_pauses_under_load_and_skips_unread_prompts(
    tiny: ChatLookahead, tiny_pair: tuple[Path, Path]
) -> None:
    """The draft proposes tokens for one reply, none for four concurrent ones, and none after unread tokens."""
    *long, unread = [
        question * 12 for question in questions(8, seed=22)
    ]  # the prefix cache keeps whole blocks of a prompt
    prompts = [*QUESTIONS, *long, unread]
    target_ids = [message.response_metadata["token_ids"] for message in tiny.batch(prompts, policy="off")]
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        policy="exact",
        depth=4,
        temperature=0,
        max_tokens=96,
        token_speculation={
            "method": "draft_model",
            "num_speculative_tokens": 2,
            "num_speculative_tokens_per_batch_size": [[1, 3, 2], [4, 32, 0]],
        },
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
    ) as llm:
        assert_lossless(llm, target_ids[: len(QUESTIONS)])
        assert method_of(llm, tiny_pair[0]) == "draft_model"

        async def deltas(question: str, max_tokens: int, *, drafted: bool = True) -> AsyncGenerator[Delta, None]:
            async with llm.backend.engines(as_policy("off")) as engines:
                prompt = engines.target.tokenizer.chat_prompt([{"role": "user", "content": question}])
                sampling = Sampling(max_tokens=max_tokens, temperature=0, drafted=drafted)
                async with aclosing(engines.target.generate(prompt, sampling)) as generated:
                    async for delta in generated:
                        yield delta

        async def accepted_share(question: str, *, drafted: bool = True) -> float:
            """Return the accepted draft tokens of a single reply, by vLLM's count, over its tokens."""
            events = [delta async for delta in deltas(question, 96, drafted=drafted)]
            written = [token for delta in events for token in delta.token_ids]
            assert written == target_ids[prompts.index(question)]
            _, accepted = events[-1].proposals or (0, 0)
            return accepted / len(written)

        async def prefill_under_load(questions: list[str]) -> None:
            """Prefill prompts while enough replies run that the draft pauses."""
            async with AsyncExitStack() as stack:
                running = [await stack.enter_async_context(aclosing(deltas(other, 900))) for other in QUESTIONS]
                await asyncio.gather(*(anext(other) for other in running))
                for question in questions:
                    async for _ in deltas(question, 1):
                        pass
                await asyncio.gather(*(anext(other) for other in running))  # all replies still run

        assert background.run(accepted_share(long[0])) > 0.4, "draft tokens were accepted"
        batched = [message.response_metadata["token_ids"] for message in llm.batch(prompts[:8], policy="off")]
        assert batched == target_ids[:8]
        background.run(prefill_under_load(long[1:-1]))
        for question in long[1:-1]:
            assert background.run(accepted_share(question)) == 0, "the draft has not read the cached prompt"
        assert background.run(accepted_share(long[-1])) > 0.4, "the draft has read this prompt"

        assert background.run(accepted_share(unread, drafted=False)) == 0, "`drafted=False` excludes the draft"
        assert background.run(accepted_share(unread)) == 0, "the draft has not read that prompt"

        sampled = [{"temperature": 0.7, "seed": number} for number in range(6)]
        metadata = [llm.invoke(QUESTIONS[0], policy="off", **each).response_metadata for each in sampled]

        async def concurrently() -> list[AIMessage]:
            return await asyncio.gather(*(llm.ainvoke(QUESTIONS[0], policy="off", **each) for each in sampled))

        ids = [message.response_metadata["token_ids"] for message in asyncio.run(concurrently())]
        assert ids == [entry["token_ids"] for entry in metadata], "a seed determines a reply in any batch"
        other = llm.invoke(QUESTIONS[0], policy="off", temperature=0.7).response_metadata
        assert other["lookahead"]["target_forward_passes"] < len(other["token_ids"]), "draft tokens were accepted"
