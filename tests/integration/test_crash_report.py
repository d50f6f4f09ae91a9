"""`kill -9` of each model's processes in the middle of a reply: what the caller sees, and what the next call does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import shared_draft
from lookahead_agent.engines.processes import child_processes
from lookahead_agent.errors import EngineError
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.judge import EngineJudge
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import make_pair
from tests.waiting import becomes

QUESTION = "A two and three makes five apples?"
CORE, WORKER = "VLLM::EngineCor", "VLLM::Worker"
"""The two processes of an engine; the system keeps fifteen letters of a name."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """Where drafts of these tests share memory: engines of others may run at the same time."""
    with tempfile.TemporaryDirectory(dir=shared_draft.SHARED) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_draft, "SHARED", Path(folder))
        yield Path(folder)


@pytest.fixture(scope="module")
def llm(
    shared: Path, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatLookahead]:
    judge, _ = make_pair(tmp_path_factory.mktemp("judge"), seed=1)
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        judge_model=str(judge),
        policy="judge",
        depth=4,
        token_speculation="shared_draft",
        temperature=0,
        max_tokens=700,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        judge_engine_args=TINY_ENGINE,
        return_token_ids=True,
        use_daemon=False,
    ) as llm:
        llm.start()
        yield llm


def engines_of(llm: ChatLookahead) -> EngineSet:
    engines = llm.backend.running
    assert engines is not None
    return engines


def kill(engine: Any, name: str) -> None:
    for process in engine.processes:
        if process.name().startswith(name):
            process.kill()
            return
    raise AssertionError("it has no such process")


def interrupted(llm: ChatLookahead, engine: Any, name: str, policy: str) -> AIMessageChunk:
    """A reply in the middle of which one of an engine's processes is killed."""
    whole: AIMessageChunk | None = None
    for chunk in llm.stream(QUESTION, policy=policy):
        if whole is None:
            kill(engine, name)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


def figures(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = message.response_metadata["lookahead"]
    return found


def tokens(message: Any) -> list[int]:
    found: list[int] = message.response_metadata["token_ids"]
    return found


@pytest.fixture(scope="module")
def alone(llm: ChatLookahead) -> list[int]:
    """What the target writes."""
    return tokens(llm.invoke(QUESTION, policy="off"))


@pytest.mark.timeout(400)
async def test_without_its_draft_the_reply_goes_on_and_a_later_one_has_it_again(
    llm: ChatLookahead, alone: list[int]
) -> None:
    engines = engines_of(llm)
    message = interrupted(llm, engines.draft, CORE, "exact")
    assert tokens(message) == alone
    assert "killed" in figures(message)["speculation_disabled"]
    without = llm.invoke(QUESTION, policy="exact", max_tokens=50)
    assert tokens(without) == alone[:50]
    assert "being started again" in figures(without)["speculation_disabled"]
    await becomes(lambda: engines.draft is not None, seconds=180)
    # In rounds the target waits for its draft, which writes in so few tokens on any machine then.
    again = llm.invoke(QUESTION, policy="exact:synchronous=true", max_tokens=50)
    assert tokens(again) == alone[:50]
    assert figures(again)["speculation_disabled"] is None
    assert sum(figures(again)["tokens"]["draft"].values()) > 0


@pytest.mark.timeout(400)
async def test_without_its_judge_the_reply_goes_on_and_a_later_one_has_it_again(llm: ChatLookahead) -> None:
    engines = engines_of(llm)
    assert isinstance(engines.judge, EngineJudge)
    message = interrupted(llm, engines.judge.engine, CORE, "judge")
    assert len(tokens(message)) == 700
    assert "killed" in figures(message)["speculation_disabled"]
    assert "being started again" in figures(llm.invoke(QUESTION, max_tokens=50))["speculation_disabled"]
    await becomes(lambda: engines.judge is not None, seconds=180)
    assert figures(llm.invoke(QUESTION, max_tokens=50))["speculation_disabled"] is None


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [CORE, WORKER])
def test_without_its_target_the_reply_is_one_clear_error_and_the_next_call_starts_it_again(
    llm: ChatLookahead, alone: list[int], shared: Path, name: str
) -> None:
    engines = engines_of(llm)
    before = set(child_processes())
    with pytest.raises(EngineError, match="killed") as raised:
        interrupted(llm, engines.target, name, "off")
    assert "kv_cache_memory_bytes" in str(raised.value)
    assert not llm.backend.healthy()
    assert tokens(llm.invoke(QUESTION, policy="off")) == alone
    assert llm.backend.healthy()
    assert not any(process.is_running() for process in before), "nothing is left of the engines before"
    assert os.listdir(shared) == []
