"""Replies through a real nginx in front of two servers, of which one is killed and started again."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lookahead_agent.engines import Sampling, ScriptedTokenizer
from lookahead_agent.engines.affinity import AFFINITY, Affinity
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.servers import RemoteModel
from tests.unit import greedy_server

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
CONFIGURATION = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    log_format replies "$upstream_addr $http_x_session_id"; access_log {folder}/access.log replies;
    upstream replicas {{
        hash $http_x_session_id consistent; keepalive 64;
        server 127.0.0.1:{first} max_fails=0; server 127.0.0.1:{second} max_fails=0;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
        }}
    }}
}}
"""
REPLIES, LENGTH = 64, 30
TOKENS_BEFORE_DEATH = 150  # of all replies of a server, which is a small part of its share


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def is_listening(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def wait_for_line(server: subprocess.Popen[bytes], line: bytes) -> None:
    assert server.stdout is not None
    assert server.stdout.readline() == line


def start_server(port: int, *limit: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-E", greedy_server.__file__, str(port), *limit]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    wait_for_line(server, b"ready\n")
    return server


@contextmanager
def balancer(folder: Path, port: int, replicas: list[int]) -> Iterator[None]:
    """Run nginx in front of two servers."""
    assert NGINX is not None
    text = CONFIGURATION.format(folder=folder, port=port, first=replicas[0], second=replicas[1])
    (folder / "nginx.conf").write_text(text, encoding="utf-8")
    nginx = subprocess.Popen(
        [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    )
    try:
        while not is_listening(port):
            assert nginx.poll() is None, (folder / "error.log").read_text(encoding="utf-8")
            time.sleep(0.05)
        yield
    finally:
        nginx.terminate()
        nginx.wait(30)


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: see .ci/programs.sh")
async def test_no_reply_is_lost_or_changed_when_a_replica_is_killed_and_started_again(tmp_path: Path) -> None:
    port, *replicas = free_ports(3)
    servers = [start_server(replica, str(TOKENS_BEFORE_DEATH)) for replica in replicas]

    async def reply(engine: OpenAIEngine, number: int) -> tuple[list[int], int]:
        AFFINITY.set(Affinity(str(number), None, "", None))
        ids, resumptions = list[int](), 0
        async for delta in engine.generate([7, number], Sampling(LENGTH)):
            ids += delta.token_ids
            resumptions += delta.resumptions
        return ids, resumptions

    try:
        with balancer(tmp_path, port, replicas):
            remote = RemoteModel(f"http://127.0.0.1:{port}/v1", "model", timeout=60.0)
            engine = OpenAIEngine(remote, ScriptedTokenizer())  # type: ignore[arg-type]
            running = [asyncio.create_task(reply(engine, number)) for number in range(REPLIES)]
            for index in range(2):  # each hangs within its replies, is killed, and started again
                await asyncio.to_thread(wait_for_line, servers[index], b"hangs\n")
                servers[index].kill()
                assert await asyncio.to_thread(servers[index].wait, 30) == -signal.SIGKILL
                servers[index] = await asyncio.to_thread(start_server, replicas[index])
            results = await asyncio.gather(*running)
            await engine.server.aclose()
    finally:
        for server in servers:
            server.kill()
            server.wait(30)
    for number, (ids, _) in enumerate(results):
        assert ids == list(greedy_server.tokens([7, number], LENGTH)), number
    assert sum(resumptions for _, resumptions in results) > REPLIES // 4
    assert engine.in_flight == 0
    lines = (tmp_path / "access.log").read_text(encoding="utf-8").splitlines()
    assert {line.split()[0] for line in lines} >= {f"127.0.0.1:{replica}" for replica in replicas}
