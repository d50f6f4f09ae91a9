"""The server on real engines: many concurrent clients, some of which disconnect."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import psutil
import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.vllm_engine import VLLMEngine
from tests.integration.tiny_models import questions
from tests.unit.serving import serving
from tests.waiting import wait_until

STREAMS = 64


async def read_stream(client: httpx.AsyncClient, url: str, question: str, leave_after: int | None) -> int:
    """Read a streamed reply, or its first `leave_after` events; return the number of events."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": 60}
    seen = 0
    async with client.stream("POST", url + "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            seen += line.startswith("data: ")
            if seen == leave_after:
                return seen
            assert "error" not in line
    assert line == "" or line.endswith("[DONE]")
    return seen


async def load(url: str, seed: int) -> list[int]:
    """Run concurrent clients, a third of which disconnect midway."""
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        numbered = enumerate(questions(STREAMS, seed))
        return await asyncio.gather(
            *(read_stream(client, url, question, 2 if number % 3 == 0 else None) for number, question in numbered)
        )


def memory() -> tuple[float, float]:
    """Resident memory of this process, and of its engines, in MiB."""
    own, *engines = psutil.Process(), *psutil.Process().children(recursive=True)
    return own.memory_info().rss / 2**20, sum(process.memory_info().rss for process in engines) / 2**20


def unfinished(engine: Any) -> int:
    """Requests that vLLM itself has not finished."""
    assert isinstance(engine, VLLMEngine)
    count: int = engine._llm.output_processor.get_num_unfinished_requests()
    return count


@pytest.mark.timeout(900)
async def test_disconnected_streams_leave_no_request_and_memory_is_bounded(tiny: ChatLookahead) -> None:
    rounds: list[tuple[float, float]] = []
    # A copy has a lease of its own: the server closes the chat model that it serves.
    with serving(tiny.model_copy(), concurrent=24, queue=STREAMS) as (url, writer):
        engines = tiny.backend.runtime.running  # type: ignore[union-attr]
        assert engines is not None
        pair = (engines.target, engines.draft)
        for seed in range(5):
            counts = await load(url, seed)
            assert sum(count == 2 for count in counts) >= STREAMS // 3
            await wait_until(lambda: writer.admission.running == writer.admission.waiting == 0)
            await wait_until(lambda: all(engine is not None and engine.in_flight == 0 for engine in pair))
            await wait_until(lambda: all(unfinished(engine) == 0 for engine in pair))
            rounds.append(memory())
        async with httpx.AsyncClient() as client:
            text = (await client.get(url + "/metrics")).text
    print("MiB of server and engines after each round:", *(f"{own:.0f}+{engines:.0f}" for own, engines in rounds))
    assert rounds[-1][0] < rounds[1][0] * 1.02
    # vLLM's workers allocate memory for each new batch size, and meet fewer and fewer new sizes.
    assert rounds[-1][1] < rounds[1][1] * 1.1
    assert "lookahead_running 0.0" in text
