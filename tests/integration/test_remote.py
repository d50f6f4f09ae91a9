"""Target and draft behind vLLM's servers: equality with local engines, cancellation, and killed servers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from langchain_core.messages import AIMessageChunk

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.processes import end_processes
from lookahead_agent.engines.protocol import top_logprobs
from lookahead_agent.errors import EngineError
from lookahead_agent.system import background
from lookahead_agent.verifiers.judge import RemoteJudge
from tests.integration.conftest import TINY_ENGINE, descendants
from tests.integration.servers import QUICK_START, TINY, free_port, kill, vllm_server, wait_until_healthy
from tests.integration.tiny_models import questions
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "A two and three makes five apples?"
MANY = questions(12, seed=1)
"""Questions for which target and draft write some equal steps and some others."""


@dataclass
class ServerPair:
    """vLLM servers of the tiny pair, started by a script."""

    target: Path
    draft: Path
    target_port: int
    draft_port: int
    script: subprocess.Popen[bytes] = field(init=False)

    def llm(self, **fields: Any) -> ChatLookahead:
        return ChatLookahead(
            model=str(self.target),
            base_url=f"http://127.0.0.1:{self.target_port}/v1",
            draft_model=str(self.draft),
            draft_url=f"http://127.0.0.1:{self.draft_port}/v1",
            **{
                "policy": "exact:synchronous=true",
                "temperature": 0,
                "return_token_ids": True,
                "max_retries": 0,
                **fields,
            },
        )

    @property
    def environment(self) -> dict[str, str]:
        ports = {"TARGET_PORT": str(self.target_port), "DRAFT_PORT": str(self.draft_port)}
        return {**os.environ, **QUICK_START, **ports, "PYTHON": sys.executable, "TARGET_CORES": "0", "DRAFT_CORES": "1"}

    def kill(self, port: int) -> None:
        """Kill a server and its workers, as a crash does."""
        for server in descendants(self.script.pid):
            if str(port) in server.cmdline():
                processes = [*server.children(recursive=True), server]
                for process in processes:
                    process.kill()
                psutil.wait_procs(processes, timeout=20)
                return
        raise AssertionError("no server has this port")


@pytest.fixture(scope="module")
def pair(tiny_pair: tuple[Path, Path]) -> Iterator[ServerPair]:
    """The servers that `examples/serve_pair.sh` starts."""
    servers = ServerPair(*tiny_pair, free_port(), free_port())
    command = [str(EXAMPLES / "serve_pair.sh"), *map(str, tiny_pair), *TINY]
    servers.script = subprocess.Popen(
        command, env=servers.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for port in (servers.target_port, servers.draft_port):
            wait_until_healthy(servers.script, port)
        yield servers
    finally:
        started = descendants(servers.script.pid)
        servers.script.send_signal(signal.SIGTERM)
        servers.script.wait(timeout=60)
        _, alive = psutil.wait_procs(started, timeout=20)
        end_processes(alive)
    assert not alive, "the script ends its servers"


def metadata(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = message.response_metadata["lookahead"]
    return found


@pytest.mark.timeout(600)
def test_remote_engines_example_runs(pair: ServerPair) -> None:
    command = [sys.executable, str(EXAMPLES / "remote_engines.py"), str(pair.target), str(pair.draft), "A two?"]
    process = subprocess.run(command, env=pair.environment, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    assert "steps from the draft]" in process.stdout


def test_remote_replies_equal_those_of_local_engines(pair: ServerPair, tiny: ChatLookahead) -> None:
    with pair.llm(max_tokens=64) as llm:
        for question in questions(8):
            local = tiny.invoke(question, policy="off", max_tokens=64).response_metadata["token_ids"]
            remote = llm.invoke(question)
            assert remote.response_metadata["token_ids"] == local
            assert metadata(remote)["speculation_disabled"] is None
            assert metadata(remote)["tokens"]["draft"] != {"committed": 0, "rejected": 0, "aborted": 0}
        engines = llm.backend.runtime.running  # type: ignore[union-attr]
        assert engines is not None
        assert engines.draft is not None
        assert engines.draft.tokenizer.fingerprint == engines.target.tokenizer.fingerprint


def test_a_thinking_budget_holds_on_real_servers(pair: ServerPair, tmp_path: Path) -> None:
    """The servers only continue prompts, so a tokenizer whose template opens the thinking makes a thinking model."""
    folder = tmp_path / "thinking"
    shutil.copytree(pair.target, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|assistant|>", "<|assistant|><think>\n"))
    with pair.llm(tokenizer=str(folder), draft_tokenizer=str(folder), max_tokens=40) as llm:
        unlimited = llm.invoke(QUESTION, policy="off")
        assert unlimited.usage_metadata["output_token_details"]["reasoning"] == 40
        assert unlimited.text == ""
        replies = [llm.invoke(QUESTION, policy=policy, thinking_tokens=8) for policy in ("off", "exact")]
    thought = unlimited.response_metadata["token_ids"][:8]
    for reply in replies:
        assert reply.response_metadata["token_ids"][:8] == thought
        assert reply.usage_metadata["output_token_details"]["reasoning"] == 8
        assert metadata(reply)["thinking_ended_by_budget"]
        assert reply.text
    assert replies[0].response_metadata["token_ids"] == replies[1].response_metadata["token_ids"]


def test_remote_engines_support_likelihood_json_and_equal_top_logprobs(pair: ServerPair, tiny: ChatLookahead) -> None:
    with pair.llm(max_tokens=40) as llm:
        llm.start()
        local, remote = (model.backend.runtime.running for model in (tiny, llm))  # type: ignore[union-attr]
        assert local is not None
        assert remote is not None
        prompt = local.target.tokenizer.encode(QUESTION)
        # A server compiles at its first request for log-probabilities, longer than a reply waits for a verdict.
        expected, found = (background.run(top_logprobs(engines.target, prompt)) for engines in (local, remote))
        assert len(found) == len(expected) == 20
        assert found == pytest.approx(expected, abs=1e-3)
        assert metadata(llm.invoke(QUESTION, policy="likelihood:likelihood=-9"))["accepted"] > 0
        assert llm.invoke("A two?", response_format={"type": "json_object"}).text.lstrip().startswith("{")


async def test_cancelled_call_ends_the_requests_of_both_servers(pair: ServerPair) -> None:
    with pair.llm(policy="exact", max_tokens=900, temperature=1.0) as llm:
        await llm.ainvoke(QUESTION, max_tokens=1)
        engines = llm.backend.runtime.running  # type: ignore[union-attr]
        assert engines is not None
        assert engines.draft is not None
        task = asyncio.create_task(llm.ainvoke(QUESTION))
        # The server's own metric, updated with every engine step.
        await wait_until(lambda: requests_in(pair.target_port) > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: engines.target.in_flight == engines.draft.in_flight == 0)
        await wait_until(lambda: requests_in(pair.target_port) == requests_in(pair.draft_port) == 0)


def judged(pair: ServerPair, judge_port: int) -> ChatLookahead:
    """The tiny pair, with the engines of `tiny`, and the target's server as the judge."""
    return ChatLookahead(
        model=str(pair.target),
        draft_model=str(pair.draft),
        judge_model=str(pair.target),
        judge_url=f"http://127.0.0.1:{judge_port}/v1",
        depth=4,
        token_speculation="none",
        temperature=0,
        max_tokens=96,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
        max_retries=0,
    )


def judge_policy(p_aligned: float) -> dict[str, Any]:
    return {"verifier": "judge", "same_numbers": False, "p_aligned": p_aligned, "synchronous": True}


@pytest.mark.usefixtures("tiny")
def test_judge_behind_a_server_answers_with_probabilities(pair: ServerPair) -> None:
    with judged(pair, pair.target_port).model_copy(update={"policy": judge_policy(1.0)}) as llm:
        llm.start()
        assert llm.backend.running is not None
        judge = llm.backend.running.judge
        assert isinstance(judge, RemoteJudge)
        messages = [{"role": "user", "content": QUESTION}]
        probabilities = background.run(judge.first_token_probabilities(messages))
        assert len(probabilities) > 10
        assert 0.1 < sum(probabilities.values()) <= 1.0001


def assert_judge_is_missed(llm: ChatLookahead, tiny: ChatLookahead) -> None:
    """Replies are the target's, and those with steps that differ say why no judge compares them."""
    replies = llm.batch(MANY, policy=judge_policy(1.0))
    assert [reply.text for reply in replies] == [reply.text for reply in tiny.batch(MANY, policy="off")]
    reasons = [reason for reply in replies if (reason := metadata(reply)["speculation_disabled"]) is not None]
    assert reasons
    assert all("the judge at" in reason for reason in reasons), reasons


def test_unreachable_judge_disables_speculation(pair: ServerPair, tiny: ChatLookahead) -> None:
    with judged(pair, free_port()) as llm:
        assert_judge_is_missed(llm, tiny)


def requests_in(port: int) -> float:
    """Running and waiting requests by the metrics of vLLM's server."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
    )


def stream_and_kill(llm: ChatLookahead, kill: Any) -> AIMessageChunk:
    """Stream a reply, and call `kill` after the first chunk."""
    whole: AIMessageChunk | None = None
    for number, chunk in enumerate(llm.stream(QUESTION, max_tokens=700)):
        if number == 0:
            kill()
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


def test_killed_draft_server_leaves_the_targets_reply_and_is_used_again_later(pair: ServerPair) -> None:
    with pair.llm() as llm:
        target_ids = llm.invoke(QUESTION, max_tokens=700, policy="off").response_metadata["token_ids"]
        message = stream_and_kill(llm, lambda: pair.kill(pair.draft_port))
        assert message.response_metadata["token_ids"] == target_ids
        assert "the draft at" in metadata(message)["speculation_disabled"]
        degraded = llm.invoke(QUESTION, max_tokens=50)
        assert degraded.response_metadata["token_ids"] == target_ids[:50]
        assert "cannot be reached" in metadata(degraded)["speculation_disabled"]
        # A chat model that is created while the draft server is down replies without it.
        with pair.llm(timeout=599) as late:
            assert "cannot be reached" in metadata(late.invoke(QUESTION, max_tokens=20))["speculation_disabled"]
        with vllm_server(pair.draft, pair.draft_port, *TINY, cores="1"):
            recovered = llm.invoke(QUESTION, max_tokens=100)
            assert recovered.response_metadata["token_ids"] == target_ids[:100]
            assert metadata(recovered)["speculation_disabled"] is None
            assert sum(metadata(recovered)["tokens"]["draft"].values()) > 0


@pytest.mark.timeout(600)
def test_a_reply_survives_a_killed_target_server_and_without_retries_it_is_one_clear_error(
    pair: ServerPair, tiny: ChatLookahead
) -> None:
    """The server is also another model's judge, whose reply is then the target's."""
    with ExitStack() as stack:
        survivor = stack.enter_context(pair.llm(max_retries=2, policy="off"))
        expected = survivor.invoke(QUESTION, max_tokens=700)
        started: list[subprocess.Popen[bytes]] = []

        def kill_and_start() -> None:
            pair.kill(pair.target_port)
            server = vllm_server(pair.target, pair.target_port, *TINY, cores="0")
            started.append(stack.enter_context(server))

        message = stream_and_kill(survivor, kill_and_start)
        assert message.response_metadata["token_ids"] == expected.response_metadata["token_ids"]
        assert (message.text, message.usage_metadata) == (expected.text, expected.usage_metadata)
        assert metadata(message)["resumptions"] == 1
        llm = stack.enter_context(pair.llm())
        judged_llm = stack.enter_context(judged(pair, pair.target_port))
        judged_llm.start()
        with pytest.raises(EngineError, match=r"the target at http://127\.0\.0\.1:"):
            stream_and_kill(llm, lambda: kill(started[0]))
        engines = llm.backend.runtime.running  # type: ignore[union-attr]
        assert engines is not None
        assert engines.target.in_flight == 0
        assert not llm.backend.healthy()
        with pytest.raises(EngineError, match="cannot be reached"):
            llm.invoke(QUESTION)
        assert_judge_is_missed(judged_llm, tiny)
