"""The plugin by which vLLM's processes load what this library has for CPUs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import lookahead_agent.cpu
from lookahead_agent.cpu import ENTRY_POINT, VARIABLE

CPU = Path(lookahead_agent.cpu.__file__).parent
LOADED = f"""
import gc, sys
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name={ENTRY_POINT!r})
unfreeze = gc.unfreeze
plugin.load()()
print(gc.unfreeze is unfreeze, not {{"torch", "vllm", "numba"}} & set(sys.modules))
"""


def test_vllm_finds_it() -> None:
    found = entry_points(group="vllm.general_plugins", name=ENTRY_POINT)
    assert found, "the installed metadata are of an older version: run `make install`"
    (plugin,) = found
    assert plugin.value == "lookahead_agent.cpu.plugin:load"


@pytest.mark.parametrize("value", [None, "0", ""])
def test_other_users_of_the_environment_get_nothing(value: str | None) -> None:
    environment = {name: known for name, known in os.environ.items() if name != VARIABLE}
    environment |= {} if value is None else {VARIABLE: value}
    told = subprocess.run([sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("file", sorted(CPU.glob("*.py")), ids=lambda file: file.stem)
def test_it_imports_nothing_else_of_this_library(file: Path) -> None:
    modules = [
        name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    ]
    own = [name for name in modules if name.split(".")[0] == "lookahead_agent"]
    assert [name for name in own if name.split(".")[:2] != ["lookahead_agent", "cpu"]] == []


def test_a_kernel_is_not_compiled_for_a_processor_without_its_instruction() -> None:
    """LLVM would end the process; numba is told of an older processor than this one may be."""
    code = "from lookahead_agent.cpu import vnni_kernel; print(vnni_kernel.is_supported())"
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    imported = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert imported.stdout.split() == ["False"]
