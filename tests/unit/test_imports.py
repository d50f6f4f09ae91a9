"""Import layers, the modules that an import loads, and the number of modules that a request calls."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from graphlib import CycleError, TopologicalSorter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import lookahead_agent
from tests.unit.fake_vllm import tokenizer_in
from tests.unit.trips import invoke_trip, plan_execute_trip

PACKAGE = Path(lookahead_agent.__file__).parent
MAX_MODULES, MAX_CHANGES = 20, 600
MAX_PLAN_MODULES, MAX_PLAN_CHANGES = 28, 1_000
MAX_LAYERS = 12


@pytest.mark.parametrize("module", ["lookahead_agent.decoding", "lookahead_agent.theory.simulation"])
def test_decoder_loads_neither_vllm_nor_langchain_nor_http_clients(module: str) -> None:
    foreign = ["vllm", "torch", "transformers", "langchain_core", "langgraph", "httpx", "requests", "aiohttp"]
    assert _loaded(f"import {module}", foreign) == []


def test_importing_the_package_loads_no_heavy_dependency() -> None:
    heavy = ["numba", "torch", "matplotlib", "vllm", "transformers", "langchain_core"]
    assert _loaded("import lookahead_agent", heavy) == []
    assert _loaded("from lookahead_agent import ChatLookahead", ["numba", "torch", "matplotlib", "vllm"]) == []


WINDOWS = """
import importlib, multiprocessing, os, pkgutil, signal, socket, subprocess, sys
# Packages of others choose their own code by the system: import them before the functions are gone.
import filelock, httpx, huggingface_hub, langchain.agents, langgraph.graph, langgraph.checkpoint.sqlite, mcp, psutil
import mcp.client.stdio, numpy, platformdirs.unix, rich.progress, tokenizers, typer
from transformers import AutoTokenizer

lacking = {
    os: "fork forkpty geteuid getgid getuid killpg memfd_create mkfifo pidfd_open register_at_fork sched_getaffinity "
    "setgroups setsid uname WTERMSIG O_CLOEXEC O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH",
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL SIGQUIT SIGUSR1 SIGUSR2 alarm pthread_sigmask setitimer",
    socket: "AF_UNIX SO_PEERCRED recv_fds send_fds",
}
unix = socket.AF_UNIX
for module, names in lacking.items():
    for name in names.split():
        delattr(module, name)
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None

import lookahead_agent
# Programs of their own, what torch or vLLM imports, and the daemon, which needs Unix sockets.
LINUX = ("cpu", "models.int8_folder", "replay.model", "server.daemon", "server.uvicorn_server")
failed = []
def load(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        name = module.name.removeprefix("lookahead_agent.")
        if name.startswith(LINUX) or name.endswith(("worker", "worker_main", "cli.serve", "_templates")):
            continue
        try:
            loaded = importlib.import_module(module.name)
        except Exception as error:
            failed.append(f"{module.name}: {error!r}")
        else:
            if module.ispkg:
                load(loaded)
load(lookahead_agent)
assert not failed, failed
from lookahead_agent.cli.app import run_command
assert run_command(["--help"]) == 0
assert run_command(["up"]) == 1
from lookahead_agent import ChatLookahead
socket.AF_UNIX = unix  # asyncio's loop of Linux needs it
model = ChatLookahead(model="model", base_url=sys.argv[1] + "/v1", api_key="k", tokenizer=sys.argv[2], policy="off")
print(model.invoke("What is 2 + 2?").text)
"""
"""Imports the library and uses an engine behind a server, without what Python lacks on Windows."""


@contextmanager
def _completions(text: str) -> Iterator[str]:
    """Run a server of OpenAI's API whose every completion is this text, and yield its address."""

    class Completions(BaseHTTPRequestHandler):
        def _send(self, media: str, content: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", media)
            self.end_headers()
            self.wfile.write(content.encode())

        def do_GET(self) -> None:
            self._send("application/json", json.dumps({"data": [{"id": "model", "max_model_len": 4096}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            choice = {"index": 0, "text": text, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 3}
            if body.get("stream"):
                chunk = json.dumps({"choices": [choice]})
                self._send("text/event-stream", f"data: {chunk}\n\ndata: [DONE]\n\n")
            else:
                self._send("application/json", json.dumps({"choices": [choice], "usage": usage}))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_library_and_remote_engines_work_without_functions_of_linux(tmp_path: Path) -> None:
    tokenizer_in(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with _completions("aab bca") as url:
        command = [sys.executable, "-c", WINDOWS, url, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "up needs Linux" in done.stderr
    assert done.stdout.endswith("aab bca\n")


def _loaded(statement: str, modules: list[str]) -> list[str]:
    code = f"import sys; {statement}; print(*[name for name in {modules} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return process.stdout.split()


def test_only_the_engine_and_the_cpu_package_use_vllm_v1() -> None:
    """Includes names in strings; vLLM changes the modules below `vllm.v1` without notice."""
    found = [str(path.relative_to(PACKAGE)) for path in _modules().values() if "vllm.v1" in path.read_text("utf-8")]
    assert sorted(name for name in found if not name.startswith("cpu/")) == [
        "engines/vllm_engine.py",
        "engines/worker_main.py",
    ]


def test_modules_have_no_circular_imports() -> None:
    """Includes imports within a package, inside functions and under `TYPE_CHECKING`."""
    modules = {name: {found for found in _imported(path) if found != name} for name, path in _modules().items()}
    assert _cycle(modules) == []


def test_packages_form_few_layers_without_cycles() -> None:
    """Packages and top-level modules import in one direction, and the longest chain is limited."""
    packages: dict[str, set[str]] = {}
    for name, path in _modules().items():
        package = _package(name)
        imported = {_package(found) for found in _imported(path)}
        packages.setdefault(package, set()).update(imported - {package})
    assert _cycle(packages) == []
    chains: dict[str, list[str]] = {}
    for package in TopologicalSorter(packages).static_order():
        below = max((chains[found] for found in packages[package]), key=len, default=[])
        chains[package] = [package, *below]
    longest = max(chains.values(), key=len)
    assert len(longest) <= MAX_LAYERS, " -> ".join(longest)


def test_a_warm_request_calls_few_modules() -> None:
    trip = invoke_trip()
    assert {"chat/model.py", "generation/generator.py", "decoding/loop.py", "decoding/streams.py"} <= trip.modules
    assert len(trip.modules) <= MAX_MODULES, sorted(trip.modules)
    assert trip.changes <= MAX_CHANGES


def test_a_warm_plan_calls_few_modules() -> None:
    trip = plan_execute_trip()
    assert {"agents/planning.py", "agents/plans.py", "chat/model.py", "decoding/loop.py"} <= trip.modules
    assert len(trip.modules) <= MAX_PLAN_MODULES, sorted(trip.modules)
    assert trip.changes <= MAX_PLAN_CHANGES


@cache
def _modules() -> dict[str, Path]:
    """Return the library's modules by their names below `lookahead_agent`, which is "__init__" itself."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }


def _package(module: str) -> str:
    return module.split(".")[0]


def _imported(file: Path) -> Iterator[str]:
    """Yield the library's modules that a file imports or names in a string, as for `importlib`.

    A name that is not a module counts as its package, and a public name as the package's root.
    """
    known = _modules()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Not a package, whose name may stand for its folder.
            path = known.get(node.value.removeprefix("lookahead_agent."), file)
            is_module = node.value.startswith("lookahead_agent.") and path.name != "__init__.py" and path != file
            names = [node.value] if is_module else []
        else:
            continue
        for name in names:
            if f"{name}.".startswith("lookahead_agent."):
                relative = name.removeprefix("lookahead_agent").removeprefix(".")
                yield relative if relative in known else relative.rpartition(".")[0] or "__init__"


def _cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []
