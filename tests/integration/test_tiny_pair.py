"""The decoder on real vLLM with tiny random models in float32."""

from __future__ import annotations

import asyncio
import os

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import VLLMEngine
from lookahead_agent.policy import as_policy
from lookahead_agent.system.machine import available_cores
from tests.integration.tiny_models import questions
from tests.waiting import wait_until


def tokens(message: object) -> list[int]:
    return message.response_metadata["token_ids"]  # type: ignore[attr-defined, no-any-return]


def test_some_draft_steps_are_accepted_and_some_rejected(tiny: ChatLookahead) -> None:
    """Else tests on this pair would not cover both verdicts."""
    # The synchronous target waits for its draft, so draft steps are accepted on any machine.
    replies = tiny.batch(questions(12, seed=1), policy="exact:synchronous=true")
    metadata = [reply.response_metadata["lookahead"] for reply in replies]
    assert sum(entry["steps"] for entry in metadata) > 24
    assert 0 < sum(entry["accepted"] for entry in metadata) < sum(entry["steps"] for entry in metadata)


async def test_exact_is_lossless_when_sampling_with_a_seed(tiny: ChatLookahead) -> None:
    async def replies(policy: str) -> list[list[int]]:
        seeded = enumerate(questions(12, seed=9))
        calls = (tiny.ainvoke(question, policy=policy, temperature=0.8, seed=seed) for seed, question in seeded)
        return [tokens(message) for message in await asyncio.gather(*calls)]

    target_tokens = await replies("off")
    assert await replies("off") == target_tokens
    assert await replies("exact") == target_tokens


async def test_replies_sampled_without_a_seed_differ(tiny: ChatLookahead) -> None:
    replies = [tokens(await tiny.ainvoke("A two?", temperature=1.5)) for _ in range(4)]
    assert len({tuple(ids) for ids in replies}) > 1


@pytest.mark.parametrize("policy", ["off", "exact"])
def test_stop_strings_and_max_tokens_truncate_the_reply(tiny: ChatLookahead, policy: str) -> None:
    whole = tiny.invoke("A two three?", policy=policy)
    word = whole.text.split()[5]
    stopped = tiny.invoke("A two three?", policy=policy, stop=[word])
    assert stopped.text == whole.text.split(word)[0]
    short = tiny.invoke("A two three?", policy=policy, max_tokens=7)
    assert tokens(short) == tokens(whole)[:7]
    assert short.response_metadata["finish_reason"] == "length"


def test_streamed_chunks_join_to_the_reply(tiny: ChatLookahead) -> None:
    for question in questions(3, seed=4):
        assert "".join(chunk.text for chunk in tiny.stream(question)) == tiny.invoke(question).text


async def test_cancelled_calls_leave_no_request_in_the_engines(tiny: ChatLookahead) -> None:
    assert tiny.backend.runtime is not None
    async with tiny.backend.runtime.engines(as_policy("exact")) as engines:
        for delay in (0.0, 0.01, 0.05, 0.1, 0.2):
            tasks = [asyncio.create_task(tiny.ainvoke(question)) for question in questions(4, seed=5)]
            await asyncio.sleep(delay)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert engines.draft is not None
        for engine in (engines.target, engines.draft):
            await wait_until(lambda engine=engine: engine.in_flight == 0)  # type: ignore[misc]
    assert tiny.invoke("A two?").text == tiny.invoke("A two?", policy="off").text, "the engines still work"


def test_models_of_the_same_configuration_share_their_engines(tiny: ChatLookahead) -> None:
    twin = tiny.model_copy(update={"max_tokens": 5})
    other = ChatLookahead(**{name: getattr(tiny, name) for name in ("model", "draft_model", "engine_args")},
                          draft_engine_args=tiny.draft_engine_args, policy="exact", depth=4,
                          token_speculation="none", temperature=0)  # fmt: skip
    assert twin.invoke("A two?").usage_metadata["output_tokens"] == 5  # type: ignore[index]
    assert other.invoke("A two?", max_tokens=5).text == twin.invoke("A two?").text
    assert other.backend.runtime is not None
    assert tiny.backend.runtime is not None
    assert set(other.backend.runtime.launcher.held) == set(tiny.backend.runtime.launcher.held)
    other.close()
    assert tiny.invoke("A two?").text, "closing one leaves the other's engines running"


def test_target_and_draft_run_on_separate_cores(tiny: ChatLookahead) -> None:
    cores: list[set[int]] = []
    assert tiny.backend.runtime is not None
    engines = tiny.backend.runtime.running
    assert engines is not None
    for engine in (engines.target, engines.draft):
        assert isinstance(engine, VLLMEngine)
        (core,) = (process for process in engine.processes if "EngineCore" in " ".join(process.cmdline()))
        threads = [thread.id for thread in core.threads()]
        cores.append({core for thread in threads for core in os.sched_getaffinity(thread)})
    if len(available_cores()) > 1:
        assert cores[0].isdisjoint(cores[1]), cores
