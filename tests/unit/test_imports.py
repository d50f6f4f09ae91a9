"""What the algorithm does not know, and which way imports run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lookahead_agent

PACKAGE = Path(lookahead_agent.__file__).parent
LAYERS = [
    "errors",
    "plain_text",
    "jsonl",
    "progress",
    "models",
    "sandbox",
    "cpu",
    "engines",
    "decoding",
    "verifiers",
    "theory",
    "policy",
    "hardware",
    "certificates",
    "runtime",
    "generation",
    "running",
    "chat",
    "testing",
    "agents",
    "trace",
    "bench",
    "cost_model",
    "calibration",
    "server",
    "cli",
]
"""Folders and single modules; each may import from those before it."""


@pytest.mark.parametrize("module", ["lookahead_agent.decoding", "lookahead_agent.theory.simulation"])
def test_the_decoder_knows_neither_vllm_nor_langchain_nor_http(module: str) -> None:
    foreign = ["vllm", "torch", "transformers", "langchain_core", "langgraph", "httpx", "requests", "aiohttp"]
    code = f"import sys, {module}; print([name for name in {foreign} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_every_module_is_in_a_layer() -> None:
    """What lies loose has no place in the order."""
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert found == {"__init__", *LAYERS}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer: str) -> None:
    place = PACKAGE / layer
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    later = set(LAYERS[LAYERS.index(layer) + 1 :])
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in files
        for name in _layers_imported(file)
        if name in later
    ]
    assert wrong == []


def _layers_imported(file: Path) -> Iterator[str]:
    """Also by functions, and for types alone."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "lookahead_agent":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lookahead_agent."):
            yield (node.module or "").split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lookahead_agent."))
