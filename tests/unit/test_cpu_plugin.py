"""The plugin that loads this library's CPU code in vLLM's processes."""

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


def test_plugin_is_registered_as_a_vllm_entry_point() -> None:
    registered = entry_points(group="vllm.general_plugins", name=ENTRY_POINT)
    assert registered, "the installed metadata is outdated: run `make install`"
    (plugin,) = registered
    assert plugin.value == "lookahead_agent.cpu.plugin:load"


@pytest.mark.parametrize("value", [None, "0", ""])
def test_plugin_does_nothing_unless_its_variable_is_set(value: str | None) -> None:
    environment = {name: setting for name, setting in os.environ.items() if name != VARIABLE}
    environment |= {} if value is None else {VARIABLE: value}
    result = subprocess.run([sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("file", sorted(CPU.glob("*.py")), ids=lambda file: file.stem)
def test_cpu_package_imports_no_other_package_of_the_library(file: Path) -> None:
    modules = [
        name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    ]
    library_modules = [name for name in modules if name.split(".")[0] == "lookahead_agent"]
    assert [name for name in library_modules if name.split(".")[:2] != ["lookahead_agent", "cpu"]] == []
