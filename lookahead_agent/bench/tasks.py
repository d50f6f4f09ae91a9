"""Solves one problem: asks the chat model, or runs a template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool

from lookahead_agent.agents.templates import template
from lookahead_agent.agents.tool_sources import load_tools
from lookahead_agent.bench.config import TaskConfig, TaskName
from lookahead_agent.bench.problems import Problem
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.errors import ConfigurationError

_VOTING_TEMPERATURE = 0.7


def solve(
    task: TaskConfig,
    llm: ChatLookahead,
    question: str,
    seed: int | None,
    config: RunnableConfig,
    *,
    needs: Sequence[str] = (),
) -> str:
    """The reply to a question, or the answer of a template's graph that gets the tools it needs (none named: all)."""
    question = task.full_question(question)
    if task.task == "questions":
        return ask(llm, question, seed, config)
    changes: dict[str, Any] = {"seed": seed}
    if task.task == "self_consistency" and llm.temperature == 0:
        changes["temperature"] = _VOTING_TEMPERATURE  # equal votes decide nothing
    with tools_of(task, needs) as tools:
        graph = build(task.task, llm.model_copy(update=changes), tools)
        return str(graph.invoke({"messages": [HumanMessage(question)]}, config)["messages"][-1].text)


def ask(llm: ChatLookahead, question: str, seed: int | None, config: RunnableConfig) -> str:
    """The reply of the chat model to a question, so that callbacks get its step events.

    A model that streams hands these on only inside a chain or graph.
    """
    chain: Runnable[str, str] = RunnableLambda(lambda text: llm.invoke([HumanMessage(text)], seed=seed).text)
    return chain.invoke(question, config)


def build(name: TaskName, llm: ChatLookahead, tools: Sequence[BaseTool] | None = None) -> Any:
    """A template's graph, by default with tools for problems with numbers."""
    make = getattr(template("graphs", name), f"build_{name}")
    calculator = template("tools", "calculator").calculator
    if name == "supervisor":
        teams = {"calculator": [calculator], "programmer": [template("tools", "python_code").python]}
        return make(llm, teams if tools is None else {tool.name: [tool] for tool in tools})
    if name in ("reflection", "self_consistency"):
        return make(llm)
    return make(llm, [calculator] if tools is None else list(tools))


@contextmanager
def tools_of(task: TaskConfig, needs: Sequence[str] = ()) -> Iterator[list[BaseTool] | None]:
    """The tools that a run needs (none named: all), which write to a copy of their folder; None without sources."""
    if not task.tools:
        yield None
        return
    with TemporaryDirectory(prefix="lookahead-bench-") as copies:
        sources = []
        for number, source in enumerate(task.tools):
            kind, colon, folder = source.partition("files:")
            if colon and (not kind or kind.endswith("=")):
                copied = copytree(folder, Path(copies, str(number)))
                source = f"{kind}files:{copied}"
            sources.append(source)
        yield [tool for tool in load_tools(sources) if not needs or tool.name in needs]


def check_tools(task: TaskConfig, problems: Sequence[Problem]) -> None:
    """Check that a task has the tools that its problems need, before any model loads."""
    if not task.tools:
        return
    names = {tool.name for tool in load_tools(task.tools)}
    for problem in problems:
        if missing := ", ".join(sorted(set(problem.tools) - names)):
            known = ", ".join(sorted(names))
            raise ConfigurationError(f"the problem {problem.id} needs {missing}; the tools are {known}: add --tools")
