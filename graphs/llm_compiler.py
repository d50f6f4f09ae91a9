"""LLMCompiler: tools run while the plan is still being written (Kim et al., 2024, arXiv 2312.04511).

    planner ──▶ tools (remaining calls, in parallel) ──▶ … ──▶ finisher
     ║ ▲                                           │
     ║ └─────── a call failed after its retries ───┘
     ╚═▶ each call as soon as its line is committed and its references have results

A plan line calls any tool, `2. calculator("$1 * 1.19")`, where `$1` is the result of call 1. Committed lines start
tools while the planner writes the next ones. Draft lines never start tools. Only read-only tools
(`metadata={"readOnlyHint": True}`) start early; all others, and tools in `ask_before`, wait for the end of the plan.

Thoughts in different words can mean the same, so the planner's policy is lenient, and each line is a step. After
"Plan:" only the target writes. The finisher's policy is strict.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_llm_compiler(llm, tools)
    graph.invoke({"messages": [HumanMessage("...")]})["messages"][-1].text

If the planner is killed, the resumed graph plans again and repeats the early calls.
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


def build_llm_compiler(
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
        checkpointer: Saves the state after every node, so that a run can be resumed.
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
        early_calls=True,
        max_plans=max_plans,
        middleware=middleware,
        ask_before=ask_before,
        model_calls=model_calls,
    )


def graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_llm_compiler(default_llm(POLICIES), [template("tools", "calculator").calculator])
