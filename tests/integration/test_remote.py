"""Target and draft behind vLLM's servers, as real processes: what they write, and what happens when one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from langchain_core.messages import AIMessageChunk

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import background
from lookahead_agent.engines.processes import end_processes
from lookahead_agent.engines.protocol import top_logprobs
from lookahead_agent.errors import EngineError
from tests.integration.conftest import descendants
from tests.integration.servers import TINY, free_port, vllm_server, wait_until_healthy
from tests.integration.tiny_models import questions
from tests.waiting import becomes

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = "A two and three makes five apples?"


@dataclass
class Pair:
    """Servers of the tiny pair."""

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
        return {**os.environ, **ports, "PYTHON": sys.executable, "TARGET_CORES": "0", "DRAFT_CORES": "1"}

    def kill(self, port: int) -> None:
        """End a server and its workers at once, as a crash does."""
        for server in descendants(self.script.pid):
            if str(port) in server.cmdline():
                family = [*server.children(recursive=True), server]
                for process in family:
                    process.kill()
                psutil.wait_procs(family, timeout=20)
                return
        raise AssertionError("no server has this port")


@pytest.fixture(scope="module")
def pair(tiny_pair: tuple[Path, Path]) -> Iterator[Pair]:
    """The servers that the example starts."""
    servers = Pair(*tiny_pair, free_port(), free_port())
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


def figures(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = message.response_metadata["lookahead"]
    return found


@pytest.mark.timeout(600)
def test_the_example(pair: Pair) -> None:
    command = [sys.executable, str(EXAMPLES / "remote_engines.py"), str(pair.target), str(pair.draft), "A two?"]
    process = subprocess.run(command, env=pair.environment, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    assert "steps from the draft]" in process.stdout


def test_replies_are_those_of_engines_in_this_process(pair: Pair, tiny: ChatLookahead) -> None:
    with pair.llm(max_tokens=64) as llm:
        for question in questions(8):
            here = tiny.invoke(question, policy="off", max_tokens=64).response_metadata["token_ids"]
            there = llm.invoke(question)
            assert there.response_metadata["token_ids"] == here
            assert figures(there)["speculation_disabled"] is None
            assert figures(there)["tokens"]["draft"] != {"committed": 0, "rejected": 0, "aborted": 0}
        engines = llm.backend.runtime.running  # type: ignore[union-attr]
        assert engines is not None
        assert engines.draft is not None
        assert engines.draft.tokenizer.fingerprint == engines.target.tokenizer.fingerprint


def test_probabilities_and_forms_are_those_of_engines_in_this_process(pair: Pair, tiny: ChatLookahead) -> None:
    with pair.llm(max_tokens=40) as llm:
        assert figures(llm.invoke(LONG, policy="likelihood:likelihood=-9"))["accepted"] > 0
        assert llm.invoke("A two?", response_format={"type": "json_object"}).text.lstrip().startswith("{")
        here, there = (model.backend.runtime.running for model in (tiny, llm))  # type: ignore[union-attr]
        assert here is not None
        assert there is not None
        prompt = here.target.tokenizer.encode(LONG)
        mine, theirs = (background.run(top_logprobs(engines.target, prompt)) for engines in (here, there))
        assert len(theirs) == len(mine) == 20
        assert theirs == pytest.approx(mine, abs=1e-3)


async def test_a_cancelled_call_stops_the_servers(pair: Pair) -> None:
    with pair.llm(policy="exact", max_tokens=900, temperature=1.0) as llm:
        await llm.ainvoke(LONG, max_tokens=1)
        engines = llm.backend.runtime.running  # type: ignore[union-attr]
        assert engines is not None
        assert engines.draft is not None
        task = asyncio.create_task(llm.ainvoke(LONG))
        # The server's own figure, which it renews with every step of its engine.
        await becomes(lambda: requests_in(pair.target_port) > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await becomes(lambda: engines.target.in_flight == engines.draft.in_flight == 0)
        await becomes(lambda: requests_in(pair.target_port) == requests_in(pair.draft_port) == 0)


def requests_in(port: int) -> float:
    """Requests that vLLM's server says it works on."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
    )


def interrupted(llm: ChatLookahead, kill: Any) -> AIMessageChunk:
    """A reply during which something is killed."""
    whole: AIMessageChunk | None = None
    for number, chunk in enumerate(llm.stream(LONG, max_tokens=700)):
        if number == 0:
            kill()
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


def test_killing_the_draft_leaves_the_targets_reply_and_it_is_used_again_when_it_comes_back(pair: Pair) -> None:
    with pair.llm() as llm:
        alone = llm.invoke(LONG, max_tokens=700, policy="off").response_metadata["token_ids"]
        message = interrupted(llm, lambda: pair.kill(pair.draft_port))
        assert message.response_metadata["token_ids"] == alone
        assert "the draft at" in figures(message)["speculation_disabled"]
        without = llm.invoke(LONG, max_tokens=50)
        assert without.response_metadata["token_ids"] == alone[:50]
        assert "cannot be reached" in figures(without)["speculation_disabled"]
        # A model that is made while the draft is away finds it later.
        with pair.llm(timeout=599) as late:
            assert "cannot be reached" in figures(late.invoke(LONG, max_tokens=20))["speculation_disabled"]
        with vllm_server(pair.draft, pair.draft_port, *TINY, cores="1"):
            again = llm.invoke(LONG, max_tokens=100)
            assert again.response_metadata["token_ids"] == alone[:100]
            assert figures(again)["speculation_disabled"] is None
            assert sum(figures(again)["tokens"]["draft"].values()) > 0


def test_killing_the_target_gives_one_clear_error(pair: Pair) -> None:
    with pair.llm() as llm:
        with pytest.raises(EngineError, match=r"the target at http://127\.0\.0\.1:"):
            interrupted(llm, lambda: pair.kill(pair.target_port))
        engines = llm.backend.runtime.running  # type: ignore[union-attr]
        assert engines is not None
        assert engines.target.in_flight == 0
        assert not llm.backend.healthy()
        with pytest.raises(EngineError, match="cannot be reached"):
            llm.invoke(LONG)
