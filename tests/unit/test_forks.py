"""Forks of a process that has generated replies, and callers whose event loop closes during a reply."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lookahead_agent.engines.engine_pool import EnginePool
from lookahead_agent.engines.vllm_config import VLLMConfig
from lookahead_agent.engines.vllm_engine import VLLMEngine

FORKED = """
import multiprocessing, os, sys
from lookahead_agent.errors import LookaheadError
from lookahead_agent.testing import scripted_chat

llm = scripted_chat("One.\\n\\nTwo.", policy="exact")
assert llm.invoke("q").text == "One.\\n\\nTwo."

def ask(_):
    return llm.invoke("q").text

with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map_async(ask, range(4)).get(60) == ["One.\\n\\nTwo."] * 4)
print(llm.invoke("q").text == "One.\\n\\nTwo.", flush=True)

stream = llm.stream("q")
next(stream)
if (child := os.fork()) == 0:
    try:
        next(stream)
    except LookaheadError as error:
        print("parent process" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(len(list(stream)) > 0, flush=True)
"""
SOCKETS = """
import os, sys
from pathlib import Path
from lookahead_agent.engines.processes import socket_folder

def folder():
    return Path(socket_folder())

own = folder()
if (child := os.fork()) == 0:
    print(folder() != own and folder().is_dir(), flush=True)
    sys.exit()
os.waitpid(child, 0)
print(own.is_dir(), flush=True)
"""


def output_of(script: str) -> list[str]:
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def test_forked_processes_and_their_parent_generate_replies_and_a_stream_belongs_to_its_process() -> None:
    assert output_of(FORKED) == ["True"] * 4


def test_forked_process_has_its_own_socket_folder_and_keeps_its_parents() -> None:
    assert output_of(SOCKETS) == ["True", "True"]


class FakeEngine:
    healthy = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def close(self) -> None:
        self.calls.append("close")

    def detach_after_fork(self) -> None:
        self.calls.append("leave")


def test_pool_detaches_the_parents_engines_after_a_fork_and_starts_new_ones() -> None:
    started: list[FakeEngine] = []

    def start(_: VLLMConfig) -> Any:
        started.append(FakeEngine())
        return started[-1]

    pool, config = EnginePool(start, lambda: None), VLLMConfig(Path("model"))
    pool.acquire(config)
    pool.reset_after_fork()
    pool.release(config)  # as copies of the parent's holders do on garbage collection
    assert pool.acquire(config) is started[1]
    pool.close()
    assert [engine.calls for engine in started] == [["leave"], ["close"]]


CLOSED_LOOP = """
import asyncio, os, time
from lookahead_agent.testing import scripted_chat

llm = scripted_chat("One word after another. " * 20_000, policy="off")
loop = asyncio.new_event_loop()
reply = llm.astream("q", max_tokens=1_000_000)
loop.run_until_complete(anext(aiter(reply)))
loop.close()  # without ending what runs in it, as a program that is in a hurry does
deadline = time.monotonic() + 30
while llm.engines.target.in_flight and time.monotonic() < deadline:
    time.sleep(0.01)
print(llm.engines.target.in_flight, llm.engines.target.generated < 20_000, flush=True)
os._exit(0)
"""


def test_request_is_aborted_after_its_callers_event_loop_closes() -> None:
    assert output_of(CLOSED_LOOP) == ["0", "True"]


def test_detached_engine_is_closed_and_leaves_its_process_running() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        client = SimpleNamespace(_finalizer=weakref.finalize(process, process.kill))
        engine = VLLMEngine.__new__(VLLMEngine)
        engine._closed, engine._llm = False, SimpleNamespace(engine_core=client, shutdown=process.kill)
        engine.detach_after_fork()
        assert not engine.healthy
        assert not client._finalizer.alive
        engine.close()
        engine._llm.shutdown()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
