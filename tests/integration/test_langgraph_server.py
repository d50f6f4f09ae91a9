"""`langgraph dev` serves every template, here on a tiny model in real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from lookahead_agent.engines.processes import end_processes
from tests.integration.conftest import descendants
from tests.integration.servers import free_port, wait_until_healthy

ROOT = Path(__file__).parents[2]
# `langgraph dev` needs an older jsonschema-rs than the server's tests, so `make` installs it in a separate folder.
PACKAGES = Path(sys.prefix) / "langgraph-dev"
GRAPHS = json.loads((ROOT / "langgraph.json").read_text())["graphs"]


@pytest.fixture(scope="module")
def url(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert PACKAGES.is_dir(), "`make test` installs the LangGraph server"
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGES),
        "LOOKAHEAD_MODEL": str(tiny_pair[0]),
        "LOOKAHEAD_POLICY": "off",
        "LOOKAHEAD_MAX_TOKENS": "20",
        "LANGSMITH_TRACING": "false",
    }
    command = [sys.executable, "-m", "langgraph_cli", "dev", "--no-browser", "--no-reload", "--port", str(port)]
    log = tmp_path_factory.mktemp("langgraph") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,  # where langgraph.json is
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until_healthy(process, port, "/ok", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            children = descendants(process.pid)
            process.terminate()
            process.wait(timeout=60)
            _, alive = psutil.wait_procs(children, timeout=20)
            end_processes(alive)
    assert not alive, "the server ends its engines"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", GRAPHS)
def test_run_of_every_template_ends_with_an_ai_message(url: str, name: str) -> None:
    state_input = {"messages": [{"role": "user", "content": "A two and three?"}]}
    response = httpx.post(f"{url}/runs/wait", json={"assistant_id": name, "input": state_input}, timeout=300)
    assert response.status_code == 200
    state = response.json()
    assert "__error__" not in state
    assert state["messages"][-1]["type"] == "ai"
    assert state["messages"][-1]["content"]
