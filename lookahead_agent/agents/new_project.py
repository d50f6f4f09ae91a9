"""The files of a new project, and its possible tools."""

import importlib.metadata
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from string import Template
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lookahead_agent.agents.templates import template_path
from lookahead_agent.agents.tool_sources import specialists
from lookahead_agent.agents.written_calls import format_call

_FILES = resources.files(__package__).joinpath("project")
_WRITTEN = ("main.py", "test_agent.py", "tools.py", "pyproject.toml", "README.md")
_DONE = "That is what the tools say."


@dataclass(frozen=True)
class ProjectTool:
    """A tool that a project can have, with a call for its test."""

    name: str
    source: str  # Python expression in `tools.py`
    question: str  # a question for the tool
    arguments: Mapping[str, str]  # Arguments of the test's call
    result: str  # expected text in the call's result
    files: Mapping[str, str] = field(default_factory=dict)  # further files of the project, by path
    setup: str = ""  # lines of `tools.py` before the tools
    imports: Sequence[str] = ()  # lines that source and setup need


def project_tools() -> dict[str, ProjectTool]:
    """Return the tools that a project can have, by the words of `--tools`."""
    entries = tomllib.loads(_FILES.joinpath("tools.toml").read_text("utf-8"))
    entries["sql"]["files"] = {"shop.sql": resources.files(__package__).joinpath("shop.sql").read_text("utf-8")}
    tools = {word: ProjectTool(**entry) for word, entry in entries.items()}
    aliases = {"docs": "search_documents", "read_file": "files", "write_file": "files", "http_get": "http"}
    return tools | {word: tools[name] for word, name in aliases.items()}


PROJECTS = ("plan_execute", "react", "rewoo", "llm_compiler", "supervisor")
"""The templates from which a project can start."""


def _call(name: str, arguments: Mapping[str, str]) -> str:
    return json.dumps({"name": name, "arguments": dict(arguments)})


def scripted_project_replies(template: str, tools: Sequence[ProjectTool]) -> dict[str, Any]:
    """Return the replies of a scripted model that calls the tools, by the beginning of a prompt with "_" for spaces."""
    ready, calls = _call("ready_to_answer", {}), [_call(tool.name, tool.arguments) for tool in tools]
    if template == "react":
        thoughts = [*(f"The tool {tool.name} comes next." for tool in tools), "All is said."]
        return {"You_think": thoughts, "You_carry_out": [*calls, ready], "You_answer": _DONE}
    if template == "supervisor":
        calls = [reply for call in calls for reply in (call, ready)]
        experts = {tool.name: name for name, team in specialists(tools).items() for tool in team}
        return {
            "You_lead": [*(_call(experts[tool.name], {"task": tool.question}) for tool in tools), ready],
            "You_think": [f"Now step {number}." for number in range(len(calls))],
            "You_carry_out": calls,
            "You_answer": _DONE,
        }
    lines = [f"{number}. {format_call(tool.name, tool.arguments)}" for number, tool in enumerate(tools, 1)]
    return {"You_solve": "\n".join(["The tools say it.\n\nPlan:", *lines]), "You_answer": _DONE}


SAFE_CHECKPOINTS: dict[str, Any] = {
    "env": {"LANGGRAPH_STRICT_MSGPACK": "true"},
    "checkpointer": {"serde": {"allowed_msgpack_modules": None, "pickle_fallback": False}},
}
"""Settings of `langgraph.json` that keep LangGraph's server from running code that a saved state names."""


def required_packages() -> set[str]:
    """Return the canonical names of the packages that a project needs at once: no project can have the name of one."""
    own = importlib.metadata.requires("lookahead-agent") or []
    return {"lookahead-agent", "pytest", *(canonicalize_name(Requirement(line).name) for line in own)}


def requirement(extras: str, direct_url: str | None) -> str:
    """Return the requirement of this library with `extras`, from where pip installed it.

    `direct_url` is the record of a folder, a file or a repository (PEP 610); None if it came from a package index.
    """
    if direct_url is None:
        return f"lookahead-agent[{extras}]"
    origin = json.loads(direct_url)
    url = origin["url"]
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"lookahead-agent[{extras}] @ {url}"


def project_files(name: str, template: str, tools: Sequence[str] = ("calculator",)) -> dict[str, str]:
    """Return the texts of a new project's files, by path; `tools` are keys of `project_tools`."""
    known = project_tools()
    chosen = list({known[word].name: known[word] for word in tools}.values())
    tools_name = "SPECIALISTS" if template == "supervisor" else "TOOLS"  # name of the tools in `tools.py`
    imports = {"from pathlib import Path", *(line for tool in chosen for line in tool.imports)}
    loaded = f"load_tools({_format_list([tool.source for tool in chosen], '')})"
    values = {
        "name": name,
        "template": template,
        "tools": tools_name,
        "requirement": requirement(
            "cpu,tools", importlib.metadata.distribution("lookahead-agent").read_text("direct_url.json")
        ),
        "build": f"build_{template}(llm, {tools_name})",
        "question": json.dumps(chosen[0].question),
        "imports": "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))),
        "setup": "".join(tool.setup for tool in chosen),
        "made": f"{tools_name} = {loaded if tools_name == 'TOOLS' else f'specialists({loaded})'}",
        "loaders": "load_tools" if tools_name == "TOOLS" else "load_tools, specialists",
        "script": _script(scripted_project_replies(template, chosen)),
        "expected": repr([tool.result for tool in chosen]),
        "answer": repr(_DONE),
    }
    files = {path: Template(_FILES.joinpath(f"{path}.txt").read_text("utf-8")).substitute(values) for path in _WRITTEN}
    settings = {"dependencies": ["."], "graphs": {name: "./agent.py:graph"}, **SAFE_CHECKPOINTS}
    files["agent.py"] = _agent(template, tools_name)
    files["langgraph.json"] = json.dumps(settings, indent=2) + "\n"
    files[".gitignore"] = ".venv/\n__pycache__/\n*.sqlite\n*.html\nshop.db\n"
    for tool in chosen:
        files |= tool.files
    return files


def _agent(template: str, tools: str) -> str:
    """Return the template's code with a `graph` that takes the project's tools."""
    text = template_path("graphs", template).read_text(encoding="utf-8")
    code = (
        "def graph() -> CompiledStateGraph[Any, Any, Any, Any]:\n"
        '    """The graph for LangGraph\'s own server, on the models that the environment names (`default_llm`)."""\n'
        f"    return build_{template}(default_llm(POLICIES), {tools})"
    )
    text = re.sub(r"^(?:async )?def graph\(\).*?(?=\n\n\n|\Z)", lambda _: code, text, flags=re.DOTALL | re.MULTILINE)
    text = text.rstrip() + "\n"
    # The replaced `graph` created tools, and nothing else needs their imports.
    if "template(" not in text:
        text = re.sub(r"^(from lookahead_agent\.agents\.templates import .+), template$", r"\1", text, flags=re.M)
    if "asyncio." not in text:
        text = text.replace("import asyncio\n", "")
    place = text.rindex("\nfrom lookahead_agent.")
    end = text.index("\n\n", place) + 1
    return f"{text[:end]}from tools import {tools}\n{text[end:]}"


def _script(replies: Mapping[str, Any]) -> str:
    written = {
        prompt: _format_list([repr(part) for part in reply], " " * 8) if isinstance(reply, list) else repr(reply)
        for prompt, reply in replies.items()
    }
    return "".join(f"        {prompt}={reply},\n" for prompt, reply in written.items())


def _format_list(items: Sequence[str], indent: str) -> str:
    """Format a list as code, with one line per item."""
    lines = "".join(f"{indent}    {item},\n" for item in items)
    return f"[\n{lines}{indent}]"
