"""What the algorithm does not know."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["lookahead_agent.decoding", "lookahead_agent.simulation"])
def test_the_decoder_knows_neither_vllm_nor_langchain_nor_http(module: str) -> None:
    foreign = ["vllm", "torch", "transformers", "langchain_core", "langgraph", "httpx", "requests", "aiohttp"]
    code = f"import sys, {module}; print([name for name in {foreign} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
