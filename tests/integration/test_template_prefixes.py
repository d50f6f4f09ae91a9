"""Every turn of every template prefills only tokens that no earlier request had, by the engine's token counts."""

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
# An operation other than the default one; it does not affect which tokens are read.
ARGUMENTS |= {"ir_op_priority": {"rms_norm": ["native"]}}


class RecordingEngine:
    """Records each finished request of an engine: the prompt, its cached tokens, the reply, and the number of requests
    that finished before it began."""

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
    engine = VLLMEngine(VLLMConfig(tiny_pair[0], "0", as_arguments(ARGUMENTS)))
    yield engine
    engine.close()


@tool
def count(word: str) -> str:
    """Count the letters of a word."""
    return str(len(word))


def build(name: str, llm: ChatLookahead) -> Any:
    tools: list[BaseTool] = [count]
    builder = getattr(template("graphs", name), f"build_{name}")
    if name in ("reflection", "self_consistency"):
        return builder(llm, checkpointer=InMemorySaver())
    return builder(llm, {"counter": tools} if name == "supervisor" else tools, InMemorySaver())


def test_ir_op_priority_overrides_the_default_operation(engine: VLLMEngine) -> None:
    """`test_vllm_engine.py` tests the default."""
    assert engine._llm.vllm_config.kernel_config.ir_op_priority.rms_norm[0] == "native"


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["react", "plan_execute", "rewoo", "llm_compiler", "supervisor", "reflection", "self_consistency"]
)
def test_turns_of_every_template_prefill_only_new_tokens(name: str, engine: VLLMEngine) -> None:
    recording = RecordingEngine(engine)
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
        # The engine has not read the last token of a reply.
        known = max((common(prompt, [*p, *reply[:-1]]) for p, _, reply, _ in recording.requests[:ended]), default=0)
        assert cached > min(known, len(prompt) - 1) - BLOCK, f"request {at} of {name}"
    assert sum(cached for _, cached, _, _ in recording.requests) > 0
