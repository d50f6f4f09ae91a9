"""ReWOO: plan all tool calls once, carry them out, and solve, without a model between (Xu et al., 2023).

    planner ──▶ tools (all whose inputs are known, at once) ──▶ … ──▶ solver

The planner writes one thought and one plan in place of many. A line is a call of any tool,
`2. calculator("$1 * 1.19")`, with `$1` for the result of call 1, and runs as soon as what it names is there. Lines of
tools that are declared to write (`metadata={"readOnlyHint": False}`) keep their place. The executor, a model, writes
the calls that the plan leaves open and those that failed.

Thoughts in other words are the same thoughts, so the planner's policy is lenient, and a line is a step. Behind "Plan:"
only the target writes. The solver, labelled "finisher", answers: strict.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_rewoo(llm, tools)
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
that you do not know yet. A text of several lines stands in triple quotes. Write nothing after the last call.

Answer in this form:

The question asks for ... I find it with ...

Plan:
{form}"""

SOLVER = """You answer a question from the results of tool calls. Say in one or two short sentences what the \
results say, and what is missing, if something is. Add nothing that the results do not say."""

POLICIES = {"planner": r"balanced:delimiter=/\n+/", "executor": "off", "finisher": "strict"}


def build_rewoo(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] = (),
    ask_before: Collection[str] = (),
    model_calls: int = 24,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build the graph.

    Args:
        llm: Chat model that can call tools.
        tools: The tools of a plan.
        checkpointer: Saves the state after every node, so that a run can be resumed.
        middleware: LangChain's or your own, around the plan.
        ask_before: Names of tools before which the graph stops and asks; see `standard_middleware`.
        model_calls: Turns of one question, those included that carry out the plan as it stands.

    Raises:
        ValueError: No tools, a limit below 1, or `ask_before` names no tool.
    """
    plan = PlanMiddleware(tools, planner=PLANNER, finisher=SOLVER, max_plans=1)
    plan.warm(llm)
    around = standard_middleware(llm, tools, model_calls=model_calls, ask_before=ask_before, middleware=middleware)
    return create_agent(llm, list(tools), middleware=[*around, plan], checkpointer=checkpointer)


def graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_rewoo(default_llm(POLICIES), [template("tools", "calculator").calculator])
