"""`serve` on real engines in a subprocess."""

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


def serve(pair: tuple[Path, Path], port: int, *policies: str) -> subprocess.Popen[str]:
    options = ["--port", str(port), "--served-model", "tiny", *policies]
    environment = {**os.environ, "LOOKAHEAD_SERVER_KEY": "secret"}
    return subprocess.Popen(
        command(pair, "serve", *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.timeout(300)
async def test_serve_applies_node_policies_and_finishes_replies_on_sigterm(tiny_pair: tuple[Path, Path]) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = serve(tiny_pair, port, "--node-policy", "planner=exact", "--policy", "fast")
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
        # A server that returns text without token ids, as many do, can be the target of another model.
        remote = ChatLookahead(
            model="tiny",
            base_url=url + "/v1",
            api_key="secret",  # type: ignore[arg-type]
            tokenizer=str(tiny_pair[0]),
            policy="off",
            temperature=0,
            max_tokens=30,
        )
        question = "A two and three?"
        assert (await remote.ainvoke(question)).text == (await chat.bind(temperature=0).ainvoke(question)).text
        remote.close()
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": "Bearer secret"}) as client:
            assert (await httpx.AsyncClient().get(url + "/v1/models")).status_code == 401
            await assert_healthy(client, url)
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
        assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length"), "a running reply is finished"
        assert await asyncio.to_thread(process.wait, 60) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()


@pytest.mark.timeout(300)
def test_server_killed_during_a_reply_raises_one_clear_error_and_leaves_no_engine(
    tiny_pair: tuple[Path, Path],
) -> None:
    port = free_port()
    process = serve(tiny_pair, port, "--policy", "off")
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
        ) as remote:
            reply = remote.stream("A two and three?")
            next(reply)
            children = descendants(process.pid)
            assert len(children) >= 2
            process.kill()
            with pytest.raises(EngineError, match=r"the target at http://127\.0\.0\.1:"):
                list(reply)
            with pytest.raises(EngineError, match="cannot be reached"):
                remote.invoke("A two?")
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    finally:
        process.kill()
        process.communicate()


async def assert_healthy(client: httpx.AsyncClient, url: str) -> None:
    assert (await client.get(url + "/health")).json() == {"status": "ok", "running": 0, "waiting": 0}
