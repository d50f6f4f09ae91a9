"""`kill -9` of each model's processes during a reply: the result for the caller, and that of the next call."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from langchain_core.messages import AIMessageChunk

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import shared_draft
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import EngineError
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.judge import EngineJudge
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import make_pair
from tests.waiting import wait_until

QUESTION = "A two and three makes five apples?"
OWN_ENGINE = TINY_ENGINE | {"max_model_len": 1024}
"""Arguments of no other test: chat models with equal ones share their engines, and these are killed."""


@pytest.fixture(scope="module")
def shared_folder() -> Iterator[Path]:
    """The shared memory folder of these drafts, apart from engines of other tests that run concurrently."""
    with tempfile.TemporaryDirectory(dir=shared_draft.SHARED) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_draft, "SHARED", Path(folder))
        yield Path(folder)


@pytest.fixture(scope="module")
def llm(
    shared_folder: Path, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
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
        engine_args=OWN_ENGINE,
        draft_engine_args=OWN_ENGINE,
        judge_engine_args=OWN_ENGINE,
        return_token_ids=True,
        use_daemon=False,
    ) as llm:
        llm.start()
        yield llm


def engines_of(llm: ChatLookahead) -> EngineSet:
    engines = llm.backend.running
    assert engines is not None
    return engines


def kill(engine: Any) -> None:
    (core,) = (process for process in engine.processes if process.name().startswith("VLLM::"))
    core.kill()


def stream_and_kill(llm: ChatLookahead, engine: Any, policy: str) -> AIMessageChunk:
    """Stream a reply, and kill an engine's core after the first chunk."""
    whole: AIMessageChunk | None = None
    for chunk in llm.stream(QUESTION, policy=policy):
        if whole is None:
            kill(engine)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


def metadata(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = message.response_metadata["lookahead"]
    return found


def tokens(message: Any) -> list[int]:
    found: list[int] = message.response_metadata["token_ids"]
    return found


@pytest.fixture(scope="module")
def target_tokens(llm: ChatLookahead) -> list[int]:
    """The reply of the target without speculation."""
    return tokens(llm.invoke(QUESTION, policy="off"))


@pytest.mark.timeout(400)
async def test_reply_survives_a_killed_draft_and_a_later_one_uses_the_restarted_draft(
    llm: ChatLookahead, target_tokens: list[int]
) -> None:
    engines = engines_of(llm)
    message = stream_and_kill(llm, engines.draft, "exact")
    assert tokens(message) == target_tokens
    assert "killed" in metadata(message)["speculation_disabled"]
    degraded = llm.invoke(QUESTION, policy="exact", max_tokens=50)
    assert tokens(degraded) == target_tokens[:50]
    assert "being started again" in metadata(degraded)["speculation_disabled"]
    await wait_until(lambda: engines.draft is not None, seconds=180)
    # The synchronous target waits for its draft, so the draft writes some of so few tokens on any machine.
    recovered = llm.invoke(QUESTION, policy="exact:synchronous=true", max_tokens=50)
    assert tokens(recovered) == target_tokens[:50]
    assert metadata(recovered)["speculation_disabled"] is None
    assert sum(metadata(recovered)["tokens"]["draft"].values()) > 0


@pytest.mark.timeout(400)
async def test_reply_survives_a_killed_judge_and_a_later_one_uses_the_restarted_judge(llm: ChatLookahead) -> None:
    engines = engines_of(llm)
    assert isinstance(engines.judge, EngineJudge)
    message = stream_and_kill(llm, engines.judge.engine, "judge")
    assert len(tokens(message)) == 700
    assert "killed" in metadata(message)["speculation_disabled"]
    assert "being started again" in metadata(llm.invoke(QUESTION, max_tokens=50))["speculation_disabled"]
    await wait_until(lambda: engines.judge is not None, seconds=180)
    assert metadata(llm.invoke(QUESTION, max_tokens=50))["speculation_disabled"] is None


@pytest.mark.timeout(500)
def test_reply_survives_a_killed_target_once_and_the_next_death_is_one_clear_error(
    llm: ChatLookahead, target_tokens: list[int], shared_folder: Path
) -> None:
    engines = engines_of(llm)
    assert engines.draft is not None
    assert isinstance(engines.judge, EngineJudge)
    before: list[psutil.Process] = []
    for engine in (engines.target, engines.draft, engines.judge.engine):
        assert isinstance(engine, VLLMEngine)
        before += engine.processes
    message = stream_and_kill(llm, engines.target, "off")
    assert tokens(message) == target_tokens
    assert metadata(message)["resumptions"] == 1
    assert engines_of(llm) is engines
    assert llm.backend.healthy()
    before += engines.target.processes  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="killed") as raised:
        stream_and_kill(llm, engines.target, "exact")
    assert "kv_cache_memory_bytes" in str(raised.value)
    assert not llm.backend.healthy()
    assert tokens(llm.invoke(QUESTION, policy="off")) == target_tokens
    assert llm.backend.healthy()
    _, alive = psutil.wait_procs(before, timeout=60)
    assert not alive, "no process of the earlier engines is left"
    assert os.listdir(shared_folder) == []
