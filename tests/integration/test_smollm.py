"""SmolLM2-135M, of another model family than the target, as draft and as judge."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.models.catalogue import SMOLLM2_135M
from lookahead_agent.models.conversion import converted
from lookahead_agent.models.resolve import fetch
from lookahead_agent.progress import LogProgress
from tests.integration.servers import TINY, free_port, kill, vllm_server
from tests.integration.test_real_pair import NEAR_TIE, PROBLEMS
from tests.ties import first_difference, gap_in_nats

JUDGE_ENGINE = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28, "dtype": "float32"}
MIXED = "qwen2.5-coder-1.5b-smollm2"


@pytest.fixture(scope="module")
def mixed() -> Iterator[ChatLookahead]:
    """The packaged target with a draft that has another tokenizer."""
    with ChatLookahead(model=MIXED, depth=4, temperature=0, max_tokens=48, return_token_ids=True) as llm:
        yield llm


@pytest.mark.timeout(1200)
def test_steps_of_a_draft_with_another_tokenizer_are_retokenized(mixed: ChatLookahead) -> None:
    # Accepting everything shows that the draft's text arrives whole, in the target's tokens.
    # The synchronous target waits for its draft, so some draft steps are accepted on any machine.
    message = mixed.invoke(PROBLEMS[0], policy="random:probability=1:synchronous=true", max_tokens=120)
    metadata = message.response_metadata["lookahead"]
    assert metadata["speculation_disabled"] is None
    assert metadata["accepted"] > 0
    assert "\ufffd" not in message.text
    engines = mixed.backend.runtime.running  # type: ignore[union-attr]
    assert engines is not None
    assert engines.draft is not None
    assert engines.draft.tokenizer.fingerprint != engines.target.tokenizer.fingerprint
    assert engines.target.tokenizer.decode(message.response_metadata["token_ids"]) == message.text


@pytest.mark.timeout(1200)
def test_exact_differs_from_off_at_most_by_a_near_tie(mixed: ChatLookahead) -> None:
    ids = [mixed.invoke(PROBLEMS[1], policy=policy).response_metadata["token_ids"] for policy in ("off", "exact")]
    if first_difference(ids[0], ids[1]) is not None:
        assert gap_in_nats(mixed, PROBLEMS[1], ids[0], ids[1]) < NEAR_TIE


@dataclass
class JudgeServer:
    """SmolLM2-135M behind vLLM's own server."""

    process: subprocess.Popen[bytes]
    url: str


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    port = free_port()
    arguments = ["--served-model-name", "smol", "--max-model-len", "2048", *TINY[:4], "--enforce-eager"]
    with vllm_server(converted(fetch(SMOLLM2_135M), "bf16", LogProgress()), port, *arguments) as process:
        yield JudgeServer(process, f"http://127.0.0.1:{port}/v1")


def judged_metadata(llm: ChatLookahead) -> dict[str, object]:
    policy = {"verifier": "judge", "same_numbers": False, "p_aligned": 0.0}
    metadata: dict[str, object] = llm.invoke(PROBLEMS[0], policy=policy).response_metadata["lookahead"]
    return metadata


@pytest.mark.timeout(1200)
def test_third_model_judges_draft_steps(real: ChatLookahead) -> None:
    with ChatLookahead(
        judge_model=SMOLLM2_135M.hub_id,
        judge_engine_args=JUDGE_ENGINE,
        policy="judge",
        depth=real.depth,
        token_speculation=real.token_speculation,
        temperature=0,
        max_tokens=60,
    ) as llm:
        metadata = judged_metadata(llm)
        assert metadata["speculation_disabled"] is None
        assert metadata["judge_calls"] > 0  # type: ignore[operator]
        assert len(llm.backend.runtime.launcher.held) == 3  # type: ignore[union-attr]


@pytest.mark.timeout(1200)
def test_judge_behind_a_server_judges_draft_steps(mixed: ChatLookahead, server: JudgeServer) -> None:
    with ChatLookahead(
        model=MIXED, judge_model="smol", judge_url=server.url, policy="judge", depth=4, temperature=0, max_tokens=48
    ) as llm:
        metadata = judged_metadata(llm)
        assert metadata["speculation_disabled"] is None
        assert metadata["judge_calls"] > 0  # type: ignore[operator]


@pytest.mark.timeout(1200)
def test_killed_judge_server_leaves_the_targets_reply(mixed: ChatLookahead, server: JudgeServer) -> None:
    # The judge accepts no step, so the whole reply is the target's.
    policy = {"verifier": "judge", "same_numbers": False, "p_aligned": 1.0}
    with ChatLookahead(
        model=MIXED,
        judge_model="smol",
        judge_url=server.url,
        depth=4,
        temperature=0,
        max_tokens=48,
        return_token_ids=True,
        max_retries=0,
    ) as llm:
        llm.start()
        kill(server.process)
        reply = llm.invoke(PROBLEMS[0], policy=policy)
        metadata = reply.response_metadata["lookahead"]
        assert "the judge at" in metadata["speculation_disabled"]
        assert metadata["accepted"] == 0
        ids = reply.response_metadata["token_ids"]
        target_ids = llm.invoke(PROBLEMS[0], policy="off").response_metadata["token_ids"]
        if first_difference(target_ids, ids) is not None:
            assert gap_in_nats(llm, PROBLEMS[0], target_ids, ids) < NEAR_TIE


@pytest.mark.timeout(1200)
def test_unreachable_judge_disables_speculation(mixed: ChatLookahead) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    with ChatLookahead(
        model=MIXED, judge_model="smol", judge_url=url, policy="judge", depth=4, temperature=0, max_tokens=48
    ) as llm:
        assert "cannot be reached" in str(judged_metadata(llm)["speculation_disabled"])
