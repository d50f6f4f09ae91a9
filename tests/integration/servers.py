"""vLLM's own OpenAI-compatible servers as child processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from lookahead_agent.engines.processes import end_processes
from lookahead_agent.engines.vllm_engine import IN_ONE_PROCESS
from tests.integration.conftest import descendants

QUICK_START = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Environment variables: the server compiles nothing."""
TINY = ["--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 28), "--max-model-len", "1024", "--enforce-eager"]
TINY += ["--distributed-executor-backend", IN_ONE_PROCESS]  # a worker of its own would import vLLM once more


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_healthy(
    process: subprocess.Popen[bytes], port: int, path: str = "/health", log: Path | None = None
) -> None:
    """Wait until a server's health endpoint succeeds; fail if its process ends."""
    with httpx.Client(timeout=5) as client:
        while True:
            assert process.poll() is None, log.read_text() if log is not None else "the server ended"
            try:
                if client.get(f"http://127.0.0.1:{port}{path}").is_success:
                    return
            except httpx.TransportError:
                pass
            try:
                process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and its workers, as a crash does."""
    children = descendants(process.pid)
    process.kill()
    process.wait(timeout=30)
    for child in children:
        if child.is_running():
            child.kill()
    end_processes(children)


@contextmanager
def vllm_server(model: Path, port: int, *arguments: str, cores: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A healthy server of one model."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--host", "127.0.0.1", *arguments]
    environment = {**os.environ, **QUICK_START, **({"VLLM_CPU_OMP_THREADS_BIND": cores} if cores else {})}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    children = descendants(process.pid)
    try:
        wait_until_healthy(process, port)
        children = descendants(process.pid)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)
        end_processes(children, timeout=20)
