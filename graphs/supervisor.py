"""Supervisor: an agent gives tasks to specialists, reads their findings, and passes them on to the next.

    supervisor ──▶ researcher (thinker ──▶ actor ──▶ tools …) ──▶ supervisor … ──▶ writer ──▶ (answer)
             └───▶ programmer (thinker ──▶ actor ──▶ tools …) ───────▲

The specialists are agents with tools of their own, and the supervisor's tools: their argument is a task. A specialist
also gets the question and the findings so far. The thinkers' policy is lenient (the key "thinker", or
"researcher:thinker" for one). All other policies are strict or off.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_supervisor(llm, {"researcher": [search_documents], "programmer": [python]})
    graph.invoke({"messages": [("human", "...")]})["messages"][-1].text
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.tools import ToolRuntime
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph.state import CompiledStateGraph

from lookahead_agent.agents.middleware import standard_middleware
from lookahead_agent.agents.prompts import describe_tools, result_blocks
from lookahead_agent.agents.run_record import messages_of_run
from lookahead_agent.agents.templates import build_react, default_llm, template
from lookahead_agent.agents.thinking import CallOrAnswerMiddleware
from lookahead_agent.agents.turns import outcome

SUPERVISOR = """You lead specialists who work on a question. Give the next task to the specialist who can do it: write \
it so that it can be understood alone, with the names and values that it needs. Call "ready_to_answer" when the \
findings say all that was asked for and nothing is left to do."""

WRITER = """You answer a question from what specialists found. Say in one or two short sentences what they found, and \
what is missing, if something is. Add nothing that they did not find."""

SPECIALIST = "A specialist who has these tools:\n{tools}"

TASK = """Your task: {task}

It is a part of this question: {question}

Findings so far:

{findings}"""

POLICIES = {
    "supervisor": "off",
    "thinker": r"balanced:delimiter=/:|\n+/",
    "actor": "strict",
    "finisher": "strict",
    "writer": "strict",
}


def build_supervisor(
    llm: BaseChatModel,
    tools: Mapping[str, Sequence[BaseTool]],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] = (),
    ask_before: Collection[str] = (),
    model_calls: int = 8,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build the graph.

    Args:
        llm: Chat model that can call tools.
        tools: The tools of each specialist, by the specialist's name.
        checkpointer: Saves the state after every node; needed for `ask_before`.
        middleware: Further LangChain middleware of the supervisor.
        ask_before: Names of specialists, or of their tools, whose calls a person must approve.
        model_calls: Maximum number of turns, of the supervisor per question and of a specialist per task.

    Raises:
        ValueError: `tools` is empty, a specialist has no tools, or `ask_before` has an unknown name or no checkpointer.
    """
    if not tools:
        raise ValueError("a supervisor needs at least one specialist")
    known = {*tools, *(tool.name for own_tools in tools.values() for tool in own_tools)}
    if unknown := sorted(set(ask_before) - known):
        raise ValueError(f"ask_before names neither specialists nor tools of theirs: {', '.join(unknown)}")
    if ask_before and checkpointer is None:
        raise ValueError("ask_before needs a checkpointer: a run that waits is kept there")

    def specialist(name: str, own_tools: Sequence[BaseTool]) -> BaseTool:
        to_approve = {tool.name for tool in own_tools} & set(ask_before)
        saver = checkpointer if to_approve else None
        agent = build_react(llm, own_tools, saver, ask_before=to_approve, model_calls=model_calls, name=name)

        def agent_input(task: str, runtime: ToolRuntime) -> dict[str, Any]:
            question, *findings = messages_of_run(runtime.state)
            text = TASK.format(task=task, question=question.text, findings=result_blocks(findings))
            return {"messages": [HumanMessage(text)]}

        def run(task: str, runtime: ToolRuntime) -> tuple[str, str | None]:
            return outcome(agent.invoke(agent_input(task, runtime))["messages"])

        async def arun(task: str, runtime: ToolRuntime) -> tuple[str, str | None]:
            return outcome((await agent.ainvoke(agent_input(task, runtime)))["messages"])

        description = SPECIALIST.format(tools=describe_tools(own_tools))
        return StructuredTool.from_function(run, arun, name, description, response_format="content_and_artifact")

    specialists = [specialist(name, own_tools) for name, own_tools in tools.items()]
    standard = standard_middleware(
        llm,
        specialists,
        model_calls=model_calls,
        ask_before=set(ask_before) & set(tools),
        middleware=middleware,
        node="supervisor",
        finisher="writer",
        finisher_prompt=WRITER,
    )
    flow = CallOrAnswerMiddleware(SUPERVISOR, finisher="writer", finisher_prompt=WRITER)
    return create_agent(llm, specialists, middleware=[*standard, flow], checkpointer=checkpointer)


async def graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    # Choosing a sandbox backend runs a program in each, which would block the server's event loop.
    programmer = await asyncio.to_thread(lambda: template("tools", "python_code").python)
    tools = {"calculator": [template("tools", "calculator").calculator], "programmer": [programmer]}
    return build_supervisor(default_llm(POLICIES), tools)
