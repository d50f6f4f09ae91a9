"""An engine whose process is killed says so, and what to lower."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.processes import worker_processes
from lookahead_agent.errors import EngineError


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["VLLM::EngineCor", "VLLM::Worker"])
def test_a_process_that_is_killed_is_named(tiny_pair: tuple[Path, Path], name: str) -> None:
    others = set(worker_processes())
    llm = ChatLookahead(model=str(tiny_pair[0]), policy="off", token_speculation="none", temperature=0, max_tokens=9)
    with llm:
        llm.start()
        assert llm.invoke("A two?").usage_metadata
        for process in worker_processes() - others:
            if process.name().startswith(name):
                process.kill()
        with pytest.raises(EngineError, match="killed") as raised:
            llm.invoke("A two?")
    assert "kv_cache_memory_bytes" in str(raised.value)
