"""ReAct: think, act, observe, and think again (Yao et al., 2022).

    thinker ──▶ actor ──▶ tools ──▶ thinker …
       ├───────── │ ───────▲ └──▶ finisher (a limit is reached)
       │          └──▶ (answer)       ▲
       └──────────────────────────────┘ (calculations: done)

A thought in other words is the same thought, so the thinker's policy is lenient. The actor calls tools and answers:
strict. A tool call is always the target's own. With a checkpointer, the graph can ask before a tool (`ask_before`).

With a calculator, the graph carries out a thought that is a calculation ("Total: 18 + 60") without the actor, and so a
question that is a calculation. The thinker says when it is done. The finisher answers from the results: strict.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_react(llm, [calculator])
    graph.invoke({"question": "..."})["answer"]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

from lookahead_agent.agents.calculations import calculator_arguments, fill_results, find_calculator
from lookahead_agent.agents.few_shot import DONE, calculation_prompt, next_step_prompt
from lookahead_agent.agents.metrics import Budget, Usage, add_usage
from lookahead_agent.agents.nodes import model_node, tool_node
from lookahead_agent.agents.templates import default_llm, template
from lookahead_agent.agents.tool_use import ToolOutcome, ask_or_call, check_ask_before
from lookahead_agent.generation.tool_calls import invalid_call_messages

THINKER = """You think about how to solve a problem with tools. Say in two or three short sentences what is known so \
far and what to do next. Do not work out results, and do not answer yet."""

ACTOR = """You solve a problem with tools, one call at a time. Do what the last thought says: call a tool. If the \
results already answer the problem, write the answer in one short sentence instead."""

FINISHER = """You answer a problem from the results that there are. Say what is certain and what is missing, in one \
or two short sentences. Do not calculate."""

SOLVER = """You answer a problem from results that were already found. Trust the results and do not calculate again. \
Answer in one short sentence."""

SOLVER_TASK = """Problem: {question}

Results, of which the last one is the final one:
{results}"""

POLICIES = {"thinker": "balanced", "actor": "strict", "finisher": "strict"}


class ReactState(TypedDict, total=False):
    """The graph's state; only `question` is given at the start.

    `messages` are thoughts, calls and observations, `usage` is what the run has cost, `ends` why the thinker's last
    thought is none ("solved", or "circles": it repeats itself; else empty), and `stopped` says which limit ended it,
    that it went in circles, or that there is no answer.
    """

    question: str
    messages: Annotated[list[AnyMessage], add_messages]
    usage: Annotated[Usage, add_usage]
    ends: Literal["", "solved", "circles"]
    answer: str
    stopped: str


def build_react(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    ask_before: Collection[str] = (),
    calculate: bool = True,
    budget: Budget | None = None,
) -> CompiledStateGraph[ReactState, None, ReactState, ReactState]:
    """Build the graph.

    Args:
        llm: Chat model that can call tools.
        tools: What the actor may call.
        checkpointer: Saves the state after every node; needed for `ask_before`.
        ask_before: Names of tools before which the graph stops and asks. It goes on with
            `Command(resume=True)`, or `Command(resume="why not")` if the call is not to be made.
        calculate: Whether thoughts are short lines, and the graph carries out those that are calculations. That needs
            a tool named "calculator" with one argument, which is not in `ask_before`. A thinker without other tools
            writes only calculations. False: it thinks in words.
        budget: What a run may cost.

    Raises:
        ValueError: No tools, or `ask_before` names none of them, or has no checkpointer.
    """
    if not tools:
        raise ValueError("the actor needs at least one tool")
    by_name = {tool.name: tool for tool in tools}
    check_ask_before(ask_before, by_name, checkpointer)
    budget = budget or Budget()
    caller = llm.bind_tools(list(tools))
    calculator = find_calculator(tools) if calculate and "calculator" not in ask_before else None
    # Which tools there are besides, a thinker has to think about.
    one_line = calculator is not None and len(tools) == 1

    # The calculator says what a calculation comes to.
    stop = ["\n", "="] if one_line else ["\n"]
    thinking_llm: Runnable[Any, AIMessage] = llm.bind(stop=stop) if calculate else llm

    def thinker_prompt(state: ReactState) -> list[BaseMessage] | AIMessage:
        question, so_far = state["question"].strip(), state.get("messages", [])
        if calculator is not None and fill_results(question, {}) is not None and not _thought(question, so_far):
            return AIMessage(question)
        if calculator is not None and _came_of(question, so_far):
            return AIMessage(DONE)
        if one_line:
            return calculation_prompt(question, so_far)
        if calculate:
            return next_step_prompt(question, so_far)
        return [SystemMessage(THINKER), HumanMessage(question), *so_far, HumanMessage("What next?")]

    def thinker_update(state: ReactState, reply: AIMessage) -> ReactState:
        thought, so_far = reply.text.strip(), state.get("messages", [])
        if calculate and so_far and thought == DONE:
            return {"ends": "solved"}
        said: list[AnyMessage] = [AIMessage(f"Thought: {thought}")]
        expression = fill_results(thought, {})
        if calculator is not None and expression is not None and "\n" not in expression:
            if one_line and _thought(thought, so_far):
                return {"ends": "circles"}
            arguments = calculator_arguments(calculator, expression)
            call = ToolCall(name=calculator.name, args=arguments, id=uuid4().hex)
            said.append(AIMessage("", tool_calls=[call]))
        return {"messages": said, "ends": ""}

    def actor_prompt(state: ReactState) -> list[BaseMessage]:
        return [SystemMessage(ACTOR), HumanMessage(state["question"]), *state["messages"], HumanMessage("Act now.")]

    def actor_update(state: ReactState, reply: AIMessage) -> ReactState:
        if reply.tool_calls or reply.invalid_tool_calls:
            return {"messages": [reply]}
        said: ReactState = {"messages": [reply], "answer": reply.text.strip()}
        return said if said["answer"] else {**said, "stopped": "the actor neither called a tool nor answered"}

    def calls_of(state: ReactState) -> list[ToolCall | ToolOutcome]:
        # All questions first: what follows an interrupt runs again when the graph goes on.
        return [ask_or_call(call, ask_before) for call in _last(state).tool_calls]

    def tools_update(state: ReactState, outcomes: list[ToolOutcome]) -> ReactState:
        last = _last(state)
        answers: list[AnyMessage] = [
            ToolMessage(
                outcome.output,
                tool_call_id=call["id"] or "",
                name=call["name"],
                status="error" if outcome.failed else "success",
            )
            for call, outcome in zip(last.tool_calls, outcomes, strict=True)
        ]
        # The model is told of a call that could not be read, and tries again within the budget.
        unreadable = invalid_call_messages(last)
        return {"messages": [*answers, *unreadable], "usage": Usage(steps=len(unreadable))}

    def finisher_prompt(state: ReactState) -> list[BaseMessage]:
        so_far = state.get("messages", [])
        if state.get("ends") == "solved":
            task = SOLVER_TASK.format(question=state["question"], results=_listed(so_far))
            return [SystemMessage(SOLVER), HumanMessage(task)]
        return [SystemMessage(FINISHER), HumanMessage(state["question"]), *so_far, HumanMessage("Answer.")]

    def finisher_update(state: ReactState, reply: AIMessage) -> ReactState:
        stopped = "" if state.get("ends") == "solved" else budget.reached(state.get("usage")) or ""
        if state.get("ends") == "circles":
            stopped = "the thinker repeats itself"
        return {"answer": reply.text.strip(), "stopped": stopped}

    def after_thinker(state: ReactState) -> Literal["tools", "actor", "finisher"]:
        if state.get("ends"):
            return "finisher"
        return "tools" if _calls(state) else "actor"

    def after_actor(state: ReactState) -> Literal["tools", "__end__"]:
        return "tools" if _calls(state) else "__end__"

    def after_tools(state: ReactState) -> Literal["thinker", "finisher"]:
        return "finisher" if budget.reached(state.get("usage")) else "thinker"

    builder = StateGraph(ReactState)
    builder.set_node_defaults(timeout=budget.node_timeout)
    builder.add_node("thinker", model_node(thinking_llm, thinker_prompt, thinker_update))
    builder.add_node("actor", model_node(caller, actor_prompt, actor_update))
    builder.add_node("tools", tool_node(by_name, calls_of, tools_update))
    builder.add_node("finisher", model_node(llm, finisher_prompt, finisher_update))
    builder.add_edge(START, "thinker")
    builder.add_conditional_edges("thinker", after_thinker)
    builder.add_conditional_edges("actor", after_actor)
    builder.add_conditional_edges("tools", after_tools)
    builder.add_edge("finisher", END)
    return builder.compile(checkpointer=checkpointer)


def graph() -> CompiledStateGraph[ReactState, None, ReactState, ReactState]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_react(default_llm(POLICIES), [template("tools", "calculator").calculator])


def _last(state: ReactState) -> AIMessage:
    last = state["messages"][-1]
    assert isinstance(last, AIMessage)
    return last


def _calls(state: ReactState) -> bool:
    """Whether the last message calls tools, or tries to."""
    return bool(_last(state).tool_calls or _last(state).invalid_tool_calls)


def _thought(thought: str, messages: Sequence[AnyMessage]) -> bool:
    """Whether it was thought before."""
    return any(message.text == f"Thought: {thought}" for message in messages)


def _came_of(question: str, messages: Sequence[AnyMessage]) -> bool:
    """Whether the last call was the question itself, and went well."""
    if len(messages) < 3 or messages[-3].text != f"Thought: {question}":
        return False
    last = messages[-1]
    return isinstance(last, ToolMessage) and last.status == "success"


def _listed(messages: Sequence[AnyMessage]) -> str:
    """What was thought, called, and came of it."""
    lines: list[str] = []
    thought = ""
    calls: dict[str | None, dict[str, Any]] = {}
    for message in messages:
        if isinstance(message, ToolMessage):
            arguments = ", ".join(str(value) for value in calls.get(message.tool_call_id, {}).values())
            problem = "failed: " if message.status == "error" else ""
            lines.append(f"{len(lines) + 1}. {thought}\n   {arguments} = {problem}{message.text}")
        elif isinstance(message, AIMessage):
            calls |= {call["id"]: call["args"] for call in message.tool_calls}
            thought = message.text.removeprefix("Thought: ") if message.text else thought
    return "\n".join(lines) or "none"
