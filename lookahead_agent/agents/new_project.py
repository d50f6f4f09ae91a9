"""The files of a new project."""

import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lookahead_agent.agents.project_tools import ProjectTool, project_tools
from lookahead_agent.agents.templates import template_path

_DONE = "That is what the tools say."


Script = Callable[[Sequence[ProjectTool]], Mapping[str, Any]]
"""Of the tools that a test calls, a scripted model's replies, by the beginning of a prompt with "_" for spaces."""


@dataclass(frozen=True)
class _Project:
    """What is particular about the project of a template."""

    script: Script
    tools: str = "TOOLS"  # what they are called in `tools.py`


def _call(name: str, arguments: Mapping[str, str]) -> str:
    """A reply that calls a tool, where the model has to call one."""
    return json.dumps({"name": name, "arguments": dict(arguments)})


def _plan(tools: Sequence[ProjectTool]) -> str:
    """A plan whose lines call the tools."""
    lines = [
        f"{number}. {tool.name}({', '.join(f'{name}={json.dumps(value)}' for name, value in tool.arguments.items())})"
        for number, tool in enumerate(tools, 1)
    ]
    return "The tools say it.\n\nPlan:\n" + "\n".join(lines)


_READY = _call("ready_to_answer", {})


def _acting(tools: Sequence[ProjectTool]) -> dict[str, Any]:
    return {
        "You_think": [f"The tool {tool.name} comes next." for tool in tools] + ["All is said."],
        "You_carry_out": [*(_call(tool.name, tool.arguments) for tool in tools), _READY],
        "You_answer": _DONE,
    }


def _planning(tools: Sequence[ProjectTool]) -> dict[str, Any]:
    return {"You_solve": _plan(tools), "You_answer": _DONE}


def _leading(tools: Sequence[ProjectTool]) -> dict[str, Any]:
    calls = [one for tool in tools for one in (_call(tool.name, tool.arguments), _READY)]
    return {
        "You_lead": [*(_call(_expert(tool), {"task": tool.question}) for tool in tools), _READY],
        "You_think": [f"Now step {number}." for number in range(len(calls))],
        "You_carry_out": calls,
        "You_answer": _DONE,
    }


def _expert(tool: ProjectTool) -> str:
    return f"{tool.name}_expert"


PROJECTS: dict[str, _Project] = {
    "plan_execute": _Project(_planning),
    "react": _Project(_acting),
    "rewoo": _Project(_planning),
    "llm_compiler": _Project(_planning),
    "supervisor": _Project(_leading, tools="SPECIALISTS"),
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


def project_files(name: str, template: str, tools: Sequence[str] = ("calculator",)) -> dict[str, str]:
    """The texts of a new project's files, by path; `tools` are keys of `project_tools`."""
    project = PROJECTS[template]
    known = project_tools()
    chosen = list({known[word].name: known[word] for word in tools}.values())
    build = f"build_{template}(llm, {project.tools})"
    files = {
        "agent.py": _agent(template, project, build),
        "main.py": _main(template, project, build, chosen),
        "test_agent.py": _test(template, project, build, chosen),
        "langgraph.json": json.dumps(
            {"dependencies": ["."], "graphs": {name: "./agent.py:graph"}, **SAFE_CHECKPOINTS}, indent=2
        )
        + "\n",
        "tools.py": _tools(project.tools, chosen),
        "pyproject.toml": _pyproject(name),
        "README.md": _readme(name, template),
        ".gitignore": ".venv/\n__pycache__/\n*.sqlite\n*.html\nshop.db\n",
    }
    for tool in chosen:
        files |= tool.files
    return files


def _agent(template: str, project: _Project, build: str) -> str:
    """The template, whose `graph` takes the project's tools."""
    text = template_path("graphs", template).read_text(encoding="utf-8")
    ours = (
        "def graph() -> CompiledStateGraph[Any, Any, Any, Any]:\n"
        '    """The graph for LangGraph\'s own server, on the models that the environment names (`default_llm`)."""\n'
        f"    return {build.replace('(llm,', '(default_llm(POLICIES),')}\n"
    )
    text = re.sub(
        r"^(?:async )?def graph\(\).*?(?=\n\n\n|\Z)", lambda _: ours.rstrip(), text, flags=re.DOTALL | re.MULTILINE
    )
    text = text.rstrip() + "\n"
    # The tools that were made there need no imports any more.
    if "template(" not in text:
        text = re.sub(
            r"^(from lookahead_agent\.agents\.templates import .+), template$", r"\1", text, flags=re.MULTILINE
        )
    if "asyncio." not in text:
        text = text.replace("import asyncio\n", "")
    place = text.rindex("\nfrom lookahead_agent.")
    end = text.index("\n\n", place) + 1
    return f"{text[:end]}from tools import {project.tools}\n{text[end:]}"


def _tools(name: str, chosen: Sequence[ProjectTool]) -> str:
    imports = sorted({"from pathlib import Path", *(line for tool in chosen for line in tool.imports)}, key=_by_kind)
    if name == "TOOLS":
        made = f"TOOLS = load_tools({_listed([tool.source for tool in chosen], '')})"
    else:
        experts = "".join(f'    "{_expert(tool)}": load_tools([{tool.source}]),\n' for tool in chosen)
        made = f"SPECIALISTS = {{\n{experts}}}"
    above = "\n".join(imports)
    setup = "".join(tool.setup for tool in chosen)
    return f'''"""The agent's tools, which main.py, graph() and the test use.

`load_tools` also takes "my_module:my_tool"; tools of LangChain's can be added to what it returns.
"""

{above}

from lookahead_agent.agents.tool_sources import load_tools

HERE = Path(__file__).parent
{setup}
{made}
'''


def _listed(items: Sequence[str], indent: str) -> str:
    """A list's code, where each item has a line of its own."""
    lines = "".join(f"{indent}    {item},\n" for item in items)
    return f"[\n{lines}{indent}]"


def _by_kind(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line


def _main(template: str, project: _Project, build: str, chosen: Sequence[ProjectTool]) -> str:
    return f'''"""Ask the agent: python main.py "a question"."""

import sys

from agent import POLICIES, build_{template}
from tools import {project.tools}

from lookahead_agent import ChatLookahead

QUESTION = {json.dumps(chosen[0].question)}


def main(question: str) -> None:
    with ChatLookahead(policies=POLICIES) as llm:
        graph = {build}
        print(graph.invoke({{"messages": [("human", question)]}})["messages"][-1].text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else QUESTION)
'''


def _test(template: str, project: _Project, build: str, chosen: Sequence[ProjectTool]) -> str:
    replies = {
        prompt: _listed([repr(each) for each in reply], " " * 8) if isinstance(reply, list) else repr(reply)
        for prompt, reply in project.script(chosen).items()
    }
    script = "".join(f"        {prompt}={reply},\n" for prompt, reply in replies.items())
    expected = [tool.result for tool in chosen]
    return f'''"""The graph on a model that follows a script: no engine, no waiting."""

from typing import Any

from agent import POLICIES, build_{template}
from langchain_core.callbacks import BaseCallbackHandler
from tools import {project.tools}

from lookahead_agent.testing import scripted_chat, scripted_replies


class Results(BaseCallbackHandler):
    """Keeps what the tools return."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_tool_end(self, output: Any, **_: Any) -> None:
        self.texts.append(str(getattr(output, "content", output)))


def test_the_graph_calls_its_tools_and_answers() -> None:
    # The next reply for the first of these texts that a prompt has.
    reply = scripted_replies(
{script}    )
    results = Results()
    llm = scripted_chat(reply, policies=POLICIES)
    graph = {build}
    state = graph.invoke({{"messages": [("human", "What do the tools say?")]}}, {{"callbacks": [results]}})
    for expected in {expected!r}:
        assert any(expected in text for text in results.texts), results.texts
    assert state["messages"][-1].text == {_DONE!r}
'''


def _pyproject(name: str) -> str:
    return f"""[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["lookahead-agent[cpu,tools]"]  # or lookahead-agent[gpu,tools] on a machine with CUDA

[project.optional-dependencies]
dev = ["pytest"]

[tool.setuptools]
py-modules = ["agent", "main", "tools"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""


def _readme(name: str, template: str) -> str:
    return f"""# {name}

An agent after the template `{template}` of lookahead-agent. `agent.py` is the graph, and
`tools.py` has its tools: change them.

    pip install -e '.[dev]'
    pytest                      # without a model
    python main.py "..."        # the first run fetches the models
    langgraph dev               # needs: pip install 'langgraph-cli[inmem]'
"""
