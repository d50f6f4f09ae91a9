"""Every turn of every template reads only what no earlier request had: token counts from the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.templates import template
from lookahead_agent.engines.protocol import Delta, Engine, Sampling
from lookahead_agent.engines.vllm_config import VLLMConfig, as_arguments
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.runtime.engine_set import EngineSet
from tests.integration.conftest import TINY_ENGINE

BLOCK = 32
ARGUMENTS = TINY_ENGINE | {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28}
# Another operation than engines have otherwise: which one it is changes nothing of what is read.
ARGUMENTS |= {"ir_op_priority": {"rms_norm": ["native"]}}


class Recording:
    """An engine, and of each request that it ended: the prompt, what the cache had of it, the reply, and how many ended
    before it began."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self.requests: list[tuple[list[int], int, list[int], int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        cached, reply, ended = 0, list[int](), len(self.requests)
        async with aclosing(self._engine.generate(prompt_ids, sampling)) as deltas:
            async for delta in deltas:
                cached = delta.cached_tokens if delta.cached_tokens is not None else cached
                reply += delta.token_ids
                if delta.finish_reason is not None:
                    self.requests.append((list(prompt_ids), cached, reply, ended))
                yield delta


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Iterator[VLLMEngine]:
    started = VLLMEngine(VLLMConfig(tiny_pair[0], "0", as_arguments(ARGUMENTS)))
    yield started
    started.close()


@tool
def count(word: str) -> str:
    """Count the letters of a word."""
    return str(len(word))


def build(name: str, llm: ChatLookahead) -> Any:
    tools: list[BaseTool] = [count]
    made = getattr(template("graphs", name), f"build_{name}")
    if name in ("reflection", "self_consistency"):
        return made(llm, checkpointer=InMemorySaver())
    return made(llm, {"counter": tools} if name == "supervisor" else tools, InMemorySaver())


def test_an_engine_has_other_operations_if_it_is_told(engine: VLLMEngine) -> None:
    """That it has ours otherwise is in test_vllm_engine.py."""
    assert engine._llm.vllm_config.kernel_config.ir_op_priority.rms_norm[0] == "native"


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["react", "plan_execute", "rewoo", "llm_compiler", "supervisor", "reflection", "self_consistency"]
)
def test_a_turn_reads_only_what_is_new(name: str, engine: VLLMEngine) -> None:
    recording = Recording(engine)
    llm = ChatLookahead(
        engines=EngineSet(cast(Engine, recording)),
        policies=template("graphs", name).POLICIES,
        temperature=0,
        max_tokens=40,
    )
    graph = build(name, llm)
    for question in ("How long is the word box?", "And the word apples?"):
        graph.invoke({"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": "1"}})
    assert len(recording.requests) >= 4
    for at, (prompt, cached, _, ended) in enumerate(recording.requests):
        # Nothing has read the last token of a reply.
        known = max((common(prompt, [*p, *reply[:-1]]) for p, _, reply, _ in recording.requests[:ended]), default=0)
        assert cached > min(known, len(prompt) - 1) - BLOCK, f"request {at} of {name}"
    assert sum(cached for _, cached, _, _ in recording.requests) > 0
