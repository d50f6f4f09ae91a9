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

from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph.state import CompiledStateGraph

from lookahead_agent.agents.plan_agent import FINISHER, PLANNER, build_plan_agent
from lookahead_agent.agents.templates import default_llm, template

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
    return build_plan_agent(
        llm,
        tools,
        checkpointer,
        planner=PLANNER,
        finisher=FINISHER,
        ordered=True,
        max_plans=max_plans,
        middleware=middleware,
        ask_before=ask_before,
        model_calls=model_calls,
    )


def graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_plan_execute(default_llm(POLICIES), [template("tools", "calculator").calculator])
