"""The files of a new project."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lookahead_agent.agents.templates import template_path

_QUESTION = "A bakery sells 24 trays of 18 rolls at $0.45 each. How much does it earn?"


_EARNS = "It earns $194.40."
_CALCULATE = '{"name": "calculator", "arguments": {"expression": "24 * 18 * 0.45"}}'
_READY = '{"name": "ready_to_answer", "arguments": {}}'


@dataclass(frozen=True)
class _Project:
    """What is particular about the project of a template.

    Attributes:
        build: The call that builds the graph, from `llm`.
        script: A scripted model's replies in the test, by the beginning of a prompt with "_" for spaces.
        given: The name of the graph's input; "messages": it is a conversation, as is its output.
        answer: The graph's answer in the test.
    """

    build: str
    script: dict[str, Any]
    given: str = "messages"
    answer: str = _EARNS

    @property
    def imports(self) -> str:
        """The lines that import the builder's tools."""
        return "from tools.calculator import calculator\n" if "calculator" in self.build else ""

    def answer_to(self, question: str) -> str:
        """The code that asks the graph for the answer to a question, which is code too."""
        if self.given != "messages":
            return f'graph.invoke({{"{self.given}": {question}}})["answer"]'
        return f'graph.invoke({{"messages": [("human", {question})]}})["messages"][-1].text'

    @property
    def builder(self) -> str:
        """The name of the function that builds the graph."""
        return self.build.partition("(")[0]


_PLAN: dict[str, Any] = {
    "You_solve": 'Plan:\n1. calculator("24 * 18")\n2. calculator("$1 * 0.45")',
    "You_answer": _EARNS,
}


PROJECTS: dict[str, _Project] = {
    "plan_execute": _Project("build_plan_execute(llm, [calculator])", _PLAN),
    "react": _Project(
        "build_react(llm, [calculator])",
        {"You_think": "I multiply.", "You_carry_out": [_CALCULATE, _READY], "You_answer": _EARNS},
    ),
    "rewoo": _Project("build_rewoo(llm, [calculator])", _PLAN),
    "llm_compiler": _Project("build_llm_compiler(llm, [calculator])", _PLAN),
    "reflection": _Project(
        "build_reflection(llm)",
        {
            "You_carry_out": "It earns 194.40.",
            "strict_but_fair": ["The currency is missing.", "Nothing has to change."],
            "You_read_what": ['{"verdict": "revise"}', '{"verdict": "good"}'],
            "You_improve": _EARNS,
        },
    ),
    "supervisor": _Project(
        'build_supervisor(llm, {"calculator": [calculator]})',
        {
            "You_lead": ['{"name": "calculator", "arguments": {"task": "What is 24 * 18 * 0.45?"}}', _READY],
            "You_think": "I multiply.",
            "You_carry_out": [_CALCULATE, _READY],
            "You_answer": _EARNS,
        },
    ),
    "self_consistency": _Project(
        "build_self_consistency(llm, samples=3)",
        {"You_answer": "24 trays of 18 rolls.\n\nAnswer: $194.40"},
        answer="24 trays of 18 rolls.\\n\\nAnswer: $194.40",
    ),
}


SAFE_CHECKPOINTS: dict[str, Any] = {
    "env": {"LANGGRAPH_STRICT_MSGPACK": "true"},
    "checkpointer": {"serde": {"allowed_msgpack_modules": None, "pickle_fallback": False}},
}
"""Of `langgraph.json`: LangGraph's server runs no code that a kept state names."""


def packages_needed() -> set[str]:
    """The packages that a project needs at once, by their canonical names: no project can have the name of one."""
    own = importlib.metadata.requires("lookahead-agent") or []
    return {"lookahead-agent", "pytest", *(canonicalize_name(Requirement(line).name) for line in own)}


def project_files(name: str, template: str) -> dict[str, str]:
    """The texts of a new project's files, by path.

    Args:
        name: The project's.
        template: One of `PROJECTS`.
    """
    project = PROJECTS[template]
    graph = template_path("graphs", template).read_text(encoding="utf-8")
    files = {
        "agent.py": graph,
        "main.py": _main(template, project),
        "test_agent.py": _test(project),
        "langgraph.json": json.dumps(
            {"dependencies": ["."], "graphs": {name: "./agent.py:graph"}, **SAFE_CHECKPOINTS}, indent=2
        )
        + "\n",
        "pyproject.toml": _pyproject(name),
        "README.md": _readme(name, template),
        ".gitignore": ".venv/\n__pycache__/\n*.sqlite\n*.html\n",
    }
    if project.imports:
        files["tools/calculator.py"] = template_path("tools", "calculator").read_text(encoding="utf-8")
        files["tools/__init__.py"] = ""
    return files


def _main(template: str, project: _Project) -> str:
    return f'''"""Ask the agent: python main.py "a question"."""

import sys

from agent import POLICIES, {project.builder}
{project.imports}
from lookahead_agent import ChatLookahead

QUESTION = "{_QUESTION}"


def main(question: str) -> None:
    with ChatLookahead(policies=POLICIES{", temperature=0.7" if template == "self_consistency" else ""}) as llm:
        graph = {project.build}
        print({project.answer_to("question")})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else QUESTION)
'''


def _test(project: _Project) -> str:
    script = "".join(f"        {prompt}={reply!r},\n" for prompt, reply in project.script.items())
    return f'''"""The graph on a model that follows a script: no engine, no waiting."""

from agent import POLICIES, {project.builder}
{project.imports}
from lookahead_agent.testing import scripted_replies, scripted_chat


def test_the_graph_answers() -> None:
    # The next reply for the first of these texts that a prompt has.
    reply = scripted_replies(
{script}    )
    llm = scripted_chat(reply, policies=POLICIES)
    graph = {project.build}
    assert {project.answer_to('"How much does it earn?"')} == "{project.answer}"
'''


def _pyproject(name: str) -> str:
    return f"""[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["lookahead-agent[cpu]"]  # or lookahead-agent[gpu] on a machine with CUDA

[project.optional-dependencies]
dev = ["pytest"]

[tool.setuptools]
py-modules = ["agent", "main"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""


def _readme(name: str, template: str) -> str:
    return f"""# {name}

An agent after the template `{template}` of lookahead-agent. `agent.py` is the graph: change it.

    pip install -e '.[dev]'
    pytest                      # without a model
    python main.py "..."        # the first run fetches the models
    langgraph dev               # needs: pip install 'langgraph-cli[inmem]'
"""
