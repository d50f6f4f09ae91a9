"""Every turn of every template prefills only tokens that no earlier request had, by the engine's token counts."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.templates import template
from lookahead_agent.engines.protocol import Delta, Engine, Sampling
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.system import background
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import WORDS
from tests.waiting import wait_until

BLOCK = 32
"""Tokens in a block of vLLM's cache on a CPU; the engine reads a partial block again."""


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


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["react", "plan_execute", "rewoo", "llm_compiler", "supervisor", "reflection", "self_consistency"]
)
def test_turns_of_every_template_prefill_only_new_tokens(name: str, tiny: ChatLookahead) -> None:
    assert tiny.backend.running is not None
    engine = tiny.backend.running.target
    assert isinstance(engine, VLLMEngine)
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


@pytest.mark.usefixtures("tiny")
async def cached_tokens(engine: Engine, ids: Sequence[int]) -> int:
    """The number of a prompt's tokens that an engine takes from its prefix cache."""
    async with aclosing(engine.generate(ids, Sampling(max_tokens=1))) as deltas:
        return next(delta.cached_tokens or 0 for delta in [delta async for delta in deltas])


def test_target_and_draft_read_a_warmed_prompt_ahead(tiny_pair: tuple[Path, Path]) -> None:
    """`test_prefix_cache.py` tests the target alone."""
    prefix = [SystemMessage("".join(random.Random(8).choices(WORDS, k=200))), HumanMessage("")]
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        policy="exact:depth=2",
        token_speculation="none",
        temperature=0,
        max_tokens=8,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
    ) as llm:
        llm.warm(prefix)
        llm.start()
        engines = llm.backend.running
        assert engines is not None
        assert engines.draft is not None
        warmer, draft = engines.warmer, engines.draft

        def read_by(engine: Engine) -> Sequence[int] | None:
            decode = engine.tokenizer.decode
            return next((ids for each, ids in warmer.known if each is engine and prefix[0].text in decode(ids)), None)

        background.run(
            wait_until(lambda: bool(read_by(engines.target) and read_by(draft)) and warmer.prefill_task is None)
        )
        reply = llm.invoke([prefix[0], HumanMessage(" apples")])
        usage = reply.usage_metadata
        assert usage is not None
        least = usage["input_tokens"] - 2 * BLOCK
        assert least > 100
        assert usage["input_token_details"]["cache_read"] >= least
        # A short reply ends before the draft's first token, so the draft is asked itself.
        ids = read_by(draft)
        assert ids is not None
        assert background.run(cached_tokens(draft, ids)) >= least
