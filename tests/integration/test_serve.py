"""The server on real engines as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest
from langchain_openai import ChatOpenAI

from lookahead_agent import ChatLookahead
from lookahead_agent.errors import EngineError
from tests.integration.command_line import command
from tests.integration.conftest import descendants
from tests.integration.servers import free_port


def serve(pair: tuple[Path, Path], port: int) -> subprocess.Popen[str]:
    served = ["--port", str(port), "--served-model", "tiny", "--node-policy", "planner=exact", "--policy", "fast"]
    environment = {**os.environ, "LOOKAHEAD_SERVER_KEY": "secret"}
    return subprocess.Popen(
        command(pair, "serve", *served), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.timeout(300)
async def test_serving_from_the_command_line(tiny_pair: tuple[Path, Path]) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = serve(tiny_pair, port)
    try:
        assert process.stderr is not None
        lines = []
        while "Serving on" not in (line := await asyncio.to_thread(process.stderr.readline)):
            lines.append(line)
            assert process.poll() is None, lines
        children = descendants(process.pid)
        assert len(children) >= 2
        chat = ChatOpenAI(base_url=url + "/v1", api_key="secret", model="tiny", max_tokens=30)  # type: ignore[arg-type, call-arg]
        assert chat.invoke("A two?").text
        # A server that tells texts and not tokens, as many do, can be the target of another model.
        far = ChatLookahead(
            model="tiny",
            base_url=url + "/v1",
            api_key="secret",  # type: ignore[arg-type]
            tokenizer=str(tiny_pair[0]),
            policy="off",
            temperature=0,
            max_tokens=30,
        )
        asked = "A two and three?"
        assert (await far.ainvoke(asked)).text == (await chat.bind(temperature=0).ainvoke(asked)).text
        far.close()
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": "Bearer secret"}) as client:
            assert (await httpx.AsyncClient().get(url + "/v1/models")).status_code == 401
            await becomes_healthy(client, url)
            body = {"messages": [{"role": "user", "content": "A two?"}], "max_tokens": 20}
            planned = await client.post(
                url + "/v1/chat/completions", json=body, headers={"X-Lookahead-Node": "planner"}
            )
            assert planned.json()["lookahead"][0]["policy"] == "exact"
            body |= {"max_tokens": 900, "stream": True, "temperature": 1.0}
            lines = []
            async with client.stream("POST", url + "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not lines:
                        process.send_signal(signal.SIGTERM)
                    lines.append(line)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length"), "what runs is finished"
        assert await asyncio.to_thread(process.wait, 60) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()


@pytest.mark.timeout(300)
def test_a_server_that_is_killed_while_it_writes_is_one_clear_error_and_leaves_no_engine(
    tiny_pair: tuple[Path, Path],
) -> None:
    port = free_port()
    process = serve(tiny_pair, port)
    try:
        assert process.stderr is not None
        while "Serving on" not in process.stderr.readline():
            assert process.poll() is None
        with ChatLookahead(
            model="tiny",
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="secret",  # type: ignore[arg-type]
            tokenizer=str(tiny_pair[0]),
            policy="off",
            temperature=1.0,
            max_tokens=900,
            max_retries=0,
        ) as far:
            reply = far.stream("A two and three?")
            next(reply)
            children = descendants(process.pid)
            assert len(children) >= 2
            process.kill()
            with pytest.raises(EngineError, match=r"the target at http://127\.0\.0\.1:"):
                list(reply)
            with pytest.raises(EngineError, match="cannot be reached"):
                far.invoke("A two?")
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    finally:
        process.kill()
        process.communicate()


async def becomes_healthy(client: httpx.AsyncClient, url: str) -> None:
    assert (await client.get(url + "/health")).json() == {"status": "ok", "running": 0, "waiting": 0}
