"""Supervisor: a router gives parts of a question to specialists, who work at once and share the engines.

    router ──▶ calculator (subgraph: thinker ──▶ actor ──▶ …) ─┐
           └─▶ researcher (subgraph: thinker ──▶ actor ──▶ …) ─┴─▶ writer

The router decides who works on which task: one choice by schema, the target's own. The specialists' thinkers have a
lenient policy ("*:thinker", or "calculator:thinker" for one); their actors and finishers are strict, as the writer.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_supervisor(llm, {"calculator": [calculator], "researcher": [search_documents]})
    graph.invoke({"question": "..."})["answer"]
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from lookahead_agent.agents.metrics import Budget, Usage, add_usage
from lookahead_agent.agents.nodes import model_node
from lookahead_agent.agents.templates import build_react, default_llm, template

ROUTER = """You give work to specialists. Write for each specialist who is needed one task, as a question that can be \
understood alone. The specialists and their tools:
{specialists}"""

WRITER = """You answer a question from what specialists found. Trust what they found. Answer in one or two short \
sentences, and say what is missing, if something is."""

POLICIES = {
    "router": "off",
    "*:thinker": r"balanced:delimiter=/:|\n+/",
    "*:actor": "strict",
    "*:finisher": "strict",
    "writer": "strict",
}


class Finding(TypedDict):
    """What a specialist found."""

    specialist: str
    task: str
    answer: str


class SupervisorState(TypedDict, total=False):
    """The graph's state; only `question` is given at the start."""

    question: str
    tasks: dict[str, str]
    findings: Annotated[list[Finding], operator.add]
    usage: Annotated[Usage, add_usage]
    answer: str
    stopped: str


class SpecialistState(TypedDict):
    """What a specialist is given."""

    task: str


def build_supervisor(
    llm: BaseChatModel,
    tools: Mapping[str, Sequence[BaseTool]],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    calculate: bool = True,
    budget: Budget | None = None,
) -> CompiledStateGraph[SupervisorState, None, SupervisorState, SupervisorState]:
    """Build the graph.

    Args:
        llm: Chat model that can call tools.
        tools: The specialists, by name, with the tools of each.
        checkpointer: Saves the state after every node.
        calculate: As for `build_react`: whether a specialist carries out calculations without its actor.
        budget: What a run may cost; each specialist may spend a part of it.

    Raises:
        ValueError: No specialists, or one without tools.
    """
    if not tools:
        raise ValueError("a supervisor needs at least one specialist")
    budget = budget or Budget()
    share = replace(budget, steps=max(4, budget.steps // len(tools)), tokens=max(1000, budget.tokens // len(tools)))
    described = "\n".join(
        f"- {name}: " + "; ".join(f"{tool.name} ({tool.description})" for tool in its) for name, its in tools.items()
    )
    schema = {
        "title": "tasks",
        "description": "A task for each specialist who is needed.",
        "type": "object",
        "properties": {name: {"type": "string"} for name in tools},
        "additionalProperties": False,
    }
    chooser = llm.with_structured_output(schema, include_raw=True)

    def router_prompt(state: SupervisorState) -> list[BaseMessage]:
        return [SystemMessage(ROUTER.format(specialists=described)), HumanMessage(state["question"])]

    def router_update(state: SupervisorState, reply: dict[str, Any]) -> SupervisorState:
        parsed = reply["parsed"] if isinstance(reply["parsed"], dict) else {}
        tasks = {name: str(task) for name, task in parsed.items() if name in tools and str(task).strip()}
        # A router that chooses nobody leaves the question to the first.
        return {"tasks": tasks or {next(iter(tools)): state["question"]}}

    def specialist(name: str) -> Runnable[SpecialistState, SupervisorState]:
        agent = build_react(llm, tools[name], calculate=calculate, budget=share)

        def specialist_update(state: SpecialistState, done: dict[str, Any]) -> SupervisorState:
            finding = Finding(specialist=name, task=state["task"], answer=done.get("answer", ""))
            return {"findings": [finding], "usage": done.get("usage") or Usage()}

        def work(state: SpecialistState) -> SupervisorState:
            return specialist_update(state, agent.invoke({"question": state["task"]}))

        async def awork(state: SpecialistState) -> SupervisorState:
            return specialist_update(state, await agent.ainvoke({"question": state["task"]}))

        return RunnableLambda(work, awork)

    def writer_prompt(state: SupervisorState) -> list[BaseMessage]:
        found = "\n".join(
            f"{entry['specialist']} was asked: {entry['task']}\n  and found: {entry['answer'] or 'nothing'}"
            for entry in sorted(state["findings"], key=lambda entry: entry["specialist"])
        )
        return [SystemMessage(WRITER), HumanMessage(f"Question: {state['question']}\n\n{found}")]

    def writer_update(state: SupervisorState, reply: AIMessage) -> SupervisorState:
        return {"answer": reply.text.strip(), "stopped": budget.reached(state.get("usage")) or ""}

    def to_specialists(state: SupervisorState) -> list[Send]:
        return [Send(name, SpecialistState(task=task)) for name, task in state["tasks"].items()]

    builder = StateGraph(SupervisorState)
    # Specialists are graphs: the time-out is for each of their nodes.
    builder.add_node("router", model_node(chooser, router_prompt, router_update), timeout=budget.node_timeout)
    for name in tools:
        builder.add_node(name, specialist(name), input_schema=SpecialistState)
        builder.add_edge(name, "writer")
    builder.add_node("writer", model_node(llm, writer_prompt, writer_update), timeout=budget.node_timeout)
    builder.add_edge(START, "router")
    builder.add_conditional_edges("router", to_specialists, list(tools))
    builder.add_edge("writer", END)
    return builder.compile(checkpointer=checkpointer)


async def graph() -> CompiledStateGraph[SupervisorState, None, SupervisorState, SupervisorState]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    # Which boundary there is for code is found by running a program behind each, which would hold up the server.
    programmer = await asyncio.to_thread(lambda: template("tools", "python_code").python)
    tools = {"calculator": [template("tools", "calculator").calculator], "programmer": [programmer]}
    return build_supervisor(default_llm(POLICIES), tools)
