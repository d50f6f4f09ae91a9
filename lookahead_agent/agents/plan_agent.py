"""The agent of the plan templates, whose files in `graphs/` say how it differs: order, early calls, new plans."""

from collections.abc import Collection, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph.state import CompiledStateGraph

from lookahead_agent.agents.early_calls import EarlyCallMiddleware
from lookahead_agent.agents.middleware import standard_middleware
from lookahead_agent.agents.planning import PlanMiddleware

PLANNER = """You solve problems with tools. You see no data yourself: only the tools do. The tools are:

{tools}

First say in one or two short sentences what is asked and how the tools find it. Then write "Plan:" and the calls that \
are needed, one per line and numbered, with all arguments. $1 stands for the result of call 1: write it for each value \
that you do not know yet. Code and texts of several lines stand in a block under their call, in place of that \
argument. Write nothing after the last call. The plan begins like this:

Plan:
{form}"""

FINISHER = """You answer a question from the results of tool calls. Say in one or two short sentences what the \
results say, and what is missing, if something is. Add nothing that the results do not say."""


def build_plan_agent(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    checkpointer: BaseCheckpointSaver[str] | None,
    *,
    planner: str,
    finisher: str,
    middleware: Sequence[AgentMiddleware[Any, Any, Any]],
    ask_before: Collection[str],
    model_calls: int,
    max_plans: int = 1,
    ordered: bool = False,
    early_calls: bool = False,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build an agent that plans tool calls, runs them, and answers from their results.

    Args:
        llm: Chat model that can call tools.
        tools: The tools of a plan.
        checkpointer: Saves the state after every node, so that a run can be resumed by its thread id.
        planner: System prompt of the planner, with {tools} and {form}; see `PlanMiddleware`.
        finisher: System prompt of the answer.
        middleware: Further middleware, LangChain's or your own, which encloses the plan.
        ask_before: Names of tools whose calls a person must approve; see `standard_middleware`.
        model_calls: Maximum number of turns per question. Turns that only issue planned calls count too.
        max_plans: Maximum number of plans per question. A call that failed after its retries causes a new plan.
        ordered: Whether the lines of a plan run in order unless their tools are read-only; see `PlanMiddleware`.
        early_calls: Whether calls start while the planner still writes; see `EarlyCallMiddleware`.

    Raises:
        ValueError: `tools` is empty, a limit is below 1, or `ask_before` names an unknown tool.
    """
    options: dict[str, Any] = {"planner": planner, "finisher": finisher, "max_plans": max_plans, "ordered": ordered}
    asking = (entry.interrupt_on for entry in middleware if isinstance(entry, HumanInTheLoopMiddleware))
    later = {*ask_before, *(name for names in asking for name in names)}
    plan = EarlyCallMiddleware(tools, later=later, **options) if early_calls else PlanMiddleware(tools, **options)
    plan.warm(llm)
    standard = standard_middleware(llm, tools, model_calls=model_calls, ask_before=ask_before, middleware=middleware)
    return create_agent(llm, list(tools), middleware=[*standard, plan], checkpointer=checkpointer)
