"""Concurrent first loads of the templates, their default model and their schemas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from langchain_core.tools import tool

from lookahead_agent.agents.templates import default_llm, template
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.testing import scripted_chat

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "graphs").glob("*.py"))


@tool
def word_of(word: str) -> str:
    """Look a word up."""
    return word


# Runs in a new process, where nothing is loaded yet. All threads start together and switch after a few bytecodes.
BUILD_ALL = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from lookahead_agent.agents import templates
from lookahead_agent.testing import scripted_chat
from langchain_core.tools import tool

@tool
def look_up(word: str) -> str:
    "Look a word up."
    return word

sys.setswitchinterval(1e-6)
llm, begin = scripted_chat("Fine.", policy="off"), threading.Barrier(12)

def build(name):
    begin.wait()
    build = getattr(templates, f"build_{name}")
    if name == "supervisor":
        graph = build(llm, {"one": [look_up]})
    elif name in ("reflection", "self_consistency"):
        graph = build(llm)
    else:
        graph = build(llm, [look_up])
    return templates.template("graphs", name), graph.invoke({"messages": [("human", "How?")]})["messages"][-1].text

with ThreadPoolExecutor(12) as pool:
    for name in sys.argv[1:]:
        found = list(pool.map(build, [name] * 12))
        assert len({id(module) for module, _ in found}) == 1, name
        assert len({answer for _, answer in found}) == 1, name
print("all")
"""

IMPORT_ALL = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import lookahead_agent
sys.setswitchinterval(1e-6)
names = [name for name in lookahead_agent.__all__ if name != "__version__"] * 3
begin = threading.Barrier(len(names))

def look(name):
    begin.wait()
    return name, id(getattr(lookahead_agent, name))

with ThreadPoolExecutor(len(names)) as pool:
    assert len(set(pool.map(look, names))) == len(names) / 3
print("all")
"""


@pytest.mark.parametrize("names", [NAMES, NAMES[::-1]], ids=["in order", "in reverse"])
def test_concurrent_first_builds_of_a_template_load_its_module_once(names: list[str]) -> None:
    command = [sys.executable, "-c", BUILD_ALL, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all"


def test_concurrent_imports_of_a_public_name_return_one_object() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all"


def test_template_whose_import_failed_is_imported_again(tmp_path: Path) -> None:
    (tmp_path / "graphs").mkdir()
    file = tmp_path / "graphs" / "half.py"
    file.write_text("FIRST = 1\nraise RuntimeError('half')\n")
    with pytest.raises(RuntimeError, match="half"):
        template("graphs", "half", [tmp_path])
    file.write_text("FIRST = 1\nSECOND = 2\n")
    assert template("graphs", "half", [tmp_path]).SECOND == 2
    assert template("graphs", "half") is template("graphs", "half", [tmp_path])


def test_default_llm_reads_numbers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_MAX_TOKENS", "20")
    monkeypatch.setenv("LOOKAHEAD_TEMPERATURE", "0.5")
    llm = default_llm({"planner": "fast"})
    assert (llm.max_tokens, llm.temperature) == (20, 0.5)
    monkeypatch.setenv("LOOKAHEAD_MAX_TOKENS", "many")
    with pytest.raises(ConfigurationError, match=r"LOOKAHEAD_MAX_TOKENS: .* not 'many'"):
        default_llm({})


@pytest.mark.parametrize("name", NAMES)
def test_graph_exposes_its_input_and_output_schema(name: str) -> None:
    """LangGraph's server and Studio build their input forms from these schemas."""
    tools = {"one": [word_of]} if name == "supervisor" else [word_of]
    arguments = [] if name in ("reflection", "self_consistency") else [tools]
    graph = getattr(template("graphs", name), f"build_{name}")(scripted_chat("Fine.", policy="off"), *arguments)
    assert graph.get_input_jsonschema()["properties"]["messages"]["type"] == "array"
    assert graph.get_output_jsonschema()["properties"]["messages"]["type"] == "array"
