"""SmolLM2-135M, of another family than the target: as draft of its steps, and as judge."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.ties import first_difference, gap_in_nats
from lookahead_agent.engines.vllm_engine import end_processes
from lookahead_agent.models import fetch
from lookahead_agent.models.catalogue import SMOLLM2_135M
from tests.integration.conftest import descendants
from tests.integration.test_real_pair import NEAR_TIE, PROBLEMS

JUDGE_ENGINE = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28, "dtype": "float32"}
PROMPT = "Do these say the same?\n\nA: {target}\n\nB: {draft}\n\nAnswer yes or no."


@pytest.fixture(scope="module")
def mixed() -> Iterator[ChatLookahead]:
    """The packaged target with a draft that has another tokenizer."""
    with ChatLookahead(model="qwen2.5-coder-1.5b-smollm2", temperature=0, max_tokens=120, return_token_ids=True) as llm:
        yield llm


@pytest.mark.timeout(1200)
def test_a_draft_with_another_tokenizer(mixed: ChatLookahead) -> None:
    # Accepting everything shows that the draft's words arrive whole, in the target's tokens.
    message = mixed.invoke(PROBLEMS[0], policy="random:probability=1")
    figures = message.response_metadata["lookahead"]
    assert figures["speculation_off"] is None
    assert figures["accepted"] > 0
    assert "\ufffd" not in message.text
    engines = mixed._runtime._engines  # type: ignore[union-attr]
    assert engines is not None
    assert engines.draft is not None
    assert engines.draft.tokenizer.fingerprint != engines.target.tokenizer.fingerprint
    assert engines.target.tokenizer.decode(message.response_metadata["token_ids"]) == message.text


@pytest.mark.timeout(1200)
def test_exact_stays_the_targets_reply(mixed: ChatLookahead) -> None:
    ids = [
        mixed.invoke(PROBLEMS[1], policy=policy).response_metadata["token_ids"]
        for policy in ("off", "exact", "balanced")
    ]
    if first_difference(ids[0], ids[1]) is not None:
        assert gap_in_nats(mixed, PROBLEMS[1], ids[0], ids[1]) < NEAR_TIE


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The model behind vLLM's own OpenAI-compatible server."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(fetch(SMOLLM2_135M))]
    command += ["--served-model-name", "smol", "--port", str(port), "--host", "127.0.0.1", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(1 << 28), "--dtype", "float32"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started = descendants(process.pid)
    try:
        transport = httpx.HTTPTransport(retries=0)
        with httpx.Client(transport=transport, timeout=5) as client:
            while True:
                assert process.poll() is None, "the server ended"
                try:
                    if client.get(f"http://127.0.0.1:{port}/health").is_success:
                        break
                except httpx.TransportError:
                    try:
                        process.wait(timeout=1)
                    except subprocess.TimeoutExpired:
                        continue
        started = descendants(process.pid)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=60)
        end_processes(started, patience=20)


def judged(llm: ChatLookahead) -> dict[str, object]:
    policy = {"verifier": "judge", "same_numbers": False, "p_aligned": 0.0, "judge_prompt": PROMPT}
    figures: dict[str, object] = llm.invoke(PROBLEMS[0], policy=policy).response_metadata["lookahead"]
    return figures


@pytest.mark.timeout(1200)
def test_a_third_model_as_judge() -> None:
    with ChatLookahead(
        judge_model=SMOLLM2_135M.hub_id, judge_engine_args=JUDGE_ENGINE, policy="judge", temperature=0, max_tokens=100
    ) as llm:
        figures = judged(llm)
        assert figures["speculation_off"] is None
        assert figures["judge_calls"] > 0  # type: ignore[operator]
        assert len(llm._runtime._held) == 3  # type: ignore[union-attr]


@pytest.mark.timeout(1200)
def test_a_judge_behind_a_server(server: str) -> None:
    with ChatLookahead(judge_model="smol", judge_url=server, policy="judge", temperature=0, max_tokens=100) as llm:
        figures = judged(llm)
        assert figures["speculation_off"] is None
        assert figures["judge_calls"] > 0  # type: ignore[operator]


@pytest.mark.timeout(1200)
def test_a_judge_that_is_away_leaves_the_target_alone() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    with ChatLookahead(judge_model="smol", judge_url=url, policy="judge", temperature=0, max_tokens=60) as llm:
        figures = judged(llm)
        assert "cannot be reached" in str(figures["speculation_off"])
