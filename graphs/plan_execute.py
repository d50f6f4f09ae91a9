"""Plan and execute: a planner thinks and plans tool calls, which run in order; a finisher answers.

    planner ──▶ tools ──▶ … ──▶ finisher
       ▲          │ (a call failed after its retries: plan again)
       └──────────┘

A plan line calls any tool, `2. calculator("$1 * 1.19")`, where `$1` is the result of call 1. The call runs as written.
The executor, a model, writes the calls of incomplete lines and rewrites failed calls. A line waits for all lines before
it, unless their tools are read-only (`metadata={"readOnlyHint": True}`) and its references have results.

Thoughts in different words can mean the same, so the planner's policy is lenient, and each line is a step. After
"Plan:" only the target writes. The finisher's policy is strict.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_plan_execute(llm, tools)
    graph.invoke({"messages": [HumanMessage("...")]})["messages"][-1].text
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph.state import CompiledStateGraph

from lookahead_agent.agents.middleware import standard_middleware
from lookahead_agent.agents.planning import PlanMiddleware
from lookahead_agent.agents.templates import default_llm, template

PLANNER = """You solve problems with tools. You see no data yourself: only the tools do. The tools are:

{tools}

First say in one or two short sentences what is asked and how the tools find it. Then write "Plan:" and the calls that \
are needed, one per line and numbered, with all arguments. $1 stands for the result of call 1: write it for each value \
that you do not know yet. Code and texts of several lines stand in a block under their call, in place of that \
argument. Write nothing after the last call. The plan has this form:

Plan:
{form}"""

FINISHER = """You answer a question from the results of tool calls. Say in one or two short sentences what the \
results say, and what is missing, if something is. Add nothing that the results do not say."""

POLICIES = {"planner": r"balanced:delimiter=/\n+/", "executor": "off", "finisher": "strict"}


def build_plan_execute(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] = (),
    ask_before: Collection[str] = (),
    max_plans: int = 2,
    model_calls: int = 24,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build the graph.

    Args:
        llm: Chat model that can call tools.
        tools: The tools of a plan.
        checkpointer: Saves the state after every node, so that a run can be resumed by its thread id.
        middleware: Further middleware, LangChain's or your own, which encloses the plan.
        ask_before: Names of tools whose calls a person must approve; see `standard_middleware`.
        max_plans: Maximum number of plans per question. A call that failed after its retries causes a new plan.
        model_calls: Maximum number of turns per question. Turns that only issue planned calls count too.

    Raises:
        ValueError: `tools` is empty, a limit is below 1, or `ask_before` names an unknown tool.
    """
    plan = PlanMiddleware(tools, planner=PLANNER, finisher=FINISHER, max_plans=max_plans, ordered=True)
    plan.warm(llm)
    standard = standard_middleware(llm, tools, model_calls=model_calls, ask_before=ask_before, middleware=middleware)
    return create_agent(llm, list(tools), middleware=[*standard, plan], checkpointer=checkpointer)


def graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_plan_execute(default_llm(POLICIES), [template("tools", "calculator").calculator])
