"""ReAct: think, act, observe, and think again (Yao et al., 2022).

    thinker ──▶ actor ──▶ tools ──▶ thinker … ──▶ finisher ──▶ (answer)

In each turn the actor decides, by guided decoding, between a tool call and the answer. A thought comes first where it
helps. Thoughts in different words can mean the same, so the thinker's policy is lenient. Calls and answers are strict.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_react(llm, [calculator])
    graph.invoke({"messages": [("human", "...")]})["messages"][-1].text
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
from lookahead_agent.agents.templates import default_llm, template
from lookahead_agent.agents.thinking import CallOrAnswerMiddleware, ThinkingMiddleware

THINKER = """You think for an assistant that answers a question with tools. Say in one or two short sentences what is \
known so far and what is to be done next. Use what tools say, make nothing up, and write no code and no calls."""

ACTOR = """You carry out a task with tools, one call at a time. Make the call that the next step needs. Call \
"ready_to_answer" when the results say all that was asked for and nothing is left to do."""

FINISHER = """You answer a question from the results of tools that were called. Say in one or two short sentences what \
the results say, and what is missing, if something is. Add nothing that the results do not say."""

POLICIES = {"thinker": "balanced", "actor": "strict", "finisher": "strict"}


def build_react(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] = (),
    ask_before: Collection[str] = (),
    model_calls: int = 12,
    think_each_turn: bool = False,
    name: str = "",
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build the graph.

    Args:
        llm: Chat model that can call tools.
        tools: Tools that the actor may call.
        checkpointer: Saves the state after every node; needed for `ask_before`.
        middleware: Further LangChain middleware, such as a to-do list or a tool selector.
        ask_before: Names of tools whose calls a person must approve, by `HumanInTheLoopMiddleware`.
        model_calls: Maximum number of turns per question. The last turn always answers.
        think_each_turn: Whether the thinker runs before each turn. False: only before the first turn, if there are
            several tools, and after failed calls. With a thought after each result, a small model never stops calling.
        name: Name of this agent among several. Its calls are then labelled "name:thinker" and so on.

    Raises:
        ValueError: `tools` is empty, or `ask_before` names an unknown tool or has no checkpointer.
    """
    if not tools:
        raise ValueError("the actor needs at least one tool")
    if ask_before and checkpointer is None:
        raise ValueError("ask_before needs a checkpointer: a run that waits is kept there")
    prefix = f"{name}:" if name else ""
    standard = standard_middleware(
        llm,
        tools,
        model_calls=model_calls,
        ask_before=ask_before,
        middleware=middleware,
        node=f"{prefix}actor",
        finisher=f"{prefix}finisher",
        finisher_prompt=FINISHER,
    )
    flow = [
        ThinkingMiddleware(THINKER, node=f"{prefix}thinker", each_turn=think_each_turn),
        CallOrAnswerMiddleware(ACTOR, finisher=f"{prefix}finisher", finisher_prompt=FINISHER),
    ]
    return create_agent(llm, list(tools), middleware=[*standard, *flow], checkpointer=checkpointer, name=name or None)


def graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_react(default_llm(POLICIES), [template("tools", "calculator").calculator])
