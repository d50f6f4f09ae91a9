"""Solves one problem: asks the chat model, or runs a template."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from lookahead_agent.agents.metrics import Budget
from lookahead_agent.agents.templates import template
from lookahead_agent.bench.config import TaskConfig, TaskName
from lookahead_agent.chat.model import ChatLookahead

BUDGET = Budget(steps=24, tokens=24_000, seconds=900)
"""Of one run of a template."""

_VOTING_TEMPERATURE = 0.7


def solve(
    task: TaskConfig,
    llm: ChatLookahead,
    question: str,
    seed: int | None,
    config: RunnableConfig,
) -> str:
    """The reply to a question, or the answer of a template's graph."""
    question = task.full_question(question)
    if task.task == "questions":
        return ask(llm, question, seed, config)
    changes: dict[str, Any] = {"seed": seed}
    if task.task == "self_consistency" and llm.temperature == 0:
        changes["temperature"] = _VOTING_TEMPERATURE  # equal votes decide nothing
    state = build(task.task, llm.model_copy(update=changes)).invoke(
        {"task" if task.task == "reflection" else "question": question}, config
    )
    return str(state.get("answer", ""))


def ask(llm: ChatLookahead, question: str, seed: int | None, config: RunnableConfig) -> str:
    """The reply of the chat model to a question, so that callbacks get its step events.

    A model that streams hands these on only inside a chain or graph.
    """
    chain: Runnable[str, str] = RunnableLambda(lambda text: llm.invoke([HumanMessage(text)], seed=seed).text)
    return chain.invoke(question, config)


def build(name: TaskName, llm: ChatLookahead) -> Any:
    """A template's graph, with tools for problems with numbers."""
    make = getattr(template("graphs", name), f"build_{name}")
    calculator = template("tools", "calculator").calculator
    how: dict[str, Any] = {"budget": BUDGET}
    if name == "supervisor":
        tools = {"calculator": [calculator], "programmer": [template("tools", "python_code").python]}
        return make(llm, tools, **how)
    if name in ("reflection", "self_consistency"):
        return make(llm, **how)
    return make(llm, [calculator], **how)
