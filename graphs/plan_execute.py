"""Plan and execute: a planner thinks and plans, an executor carries out each step with tools, a finisher answers.

    planner ──▶ executor ──▶ executor … ──▶ finisher
       ▲            │ (a step failed: plan anew)
       └────────────┘

The planner thinks at length, and a plan in other words is the same plan: lenient ("balanced"). The executor only calls
tools, which are always the target's own: "off". The finisher answers: strict.

    from lookahead_agent import ChatLookahead
    llm = ChatLookahead(policies={"planner": "balanced", "executor": "off", "finisher": "strict"})
    graph = build_plan_execute(llm, [calculator])
    graph.invoke({"question": "..."})["answer"]
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import RetryPolicy

from lookahead_agent.limits import Limits, Meter, Spent, add_spent
from lookahead_agent.templates import default_llm, template

PLANNER = """You are a planner. First think about the problem in a few short thoughts, with a blank line between \
thoughts: what is given, what is asked, and which calculations lead there. Do not work out results.

Then write the plan, one calculation per line, the last one giving the answer, like this:

Plan:
1. Cost of the pens: 12 * 1.50
2. Cost of the books: 3 * 20
3. Total cost: result 1 + result 2"""

REPLANNER = """The plan so far ran into problems. What was tried:
{results}

Write a new plan for what is still missing."""

EXECUTOR = """You carry out one step of a plan by calling a tool. Put in numbers: from the problem, or results of \
earlier steps."""

EXECUTOR_TASK = """Problem: {question}

Results of earlier steps:
{results}

Step to carry out now: {step}"""

FINISHER = """You write the answer to a problem from results that were already calculated. Trust the results and do \
not calculate again. Answer in one short sentence."""

FINISHER_TASK = """Problem: {question}

Results, of which the last one is the final one:
{results}"""

POLICIES = {"planner": "balanced", "executor": "off", "finisher": "strict"}


class StepResult(TypedDict):
    """What became of one step of the plan."""

    step: str
    tool: str
    input: dict[str, Any]
    output: str
    failed: bool


class PlanExecuteState(TypedDict, total=False):
    """The graph's state.

    Only `question` is given at the start. `plan` is what is still planned from the last (re)planning, `done` the
    number of its steps that were carried out, `plans` how often the planner ran, and `results` everything that the
    tools returned. `spent` is what the run has cost, and `stopped` says which limit ended it, if one did.
    """

    question: str
    plan: list[str]
    done: int
    plans: int
    results: Annotated[list[StepResult], operator.add]
    spent: Annotated[Spent, add_spent]
    answer: str
    stopped: str


def build_plan_execute(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    max_plans: int = 3,
    max_steps: int = 12,
    limits: Limits | None = None,
) -> CompiledStateGraph[PlanExecuteState, None, PlanExecuteState, PlanExecuteState]:
    """Build the graph.

    Args:
        llm: Chat model that can call tools.
        tools: What the executor may call.
        checkpointer: Saves the state after every node, so that a run can be resumed by its thread id.
        max_plans: How often the planner may run; after a failed step it plans anew.
        max_steps: Steps that are carried out in all; the finisher answers with what there is then.
        limits: What a run may cost; the finisher answers with what there is then.

    Raises:
        ValueError: No tools, or a limit below 1.
    """
    if not tools:
        raise ValueError("the executor needs at least one tool")
    if max_plans < 1 or max_steps < 1:
        raise ValueError("max_plans and max_steps are at least 1")
    limits = limits or Limits()
    by_name = {tool.name: tool for tool in tools}
    caller = llm.bind_tools(list(tools), tool_choice="any")

    def planner(state: PlanExecuteState) -> PlanExecuteState:
        task = state["question"]
        if results := state.get("results"):
            task += "\n\n" + REPLANNER.format(results=_listed(results))
        with Meter() as meter:
            reply = llm.invoke([SystemMessage(PLANNER), HumanMessage(task)])
            meter.count(reply)
        plan = parse_plan(reply.text) or [state["question"]]
        return {"plan": plan, "done": 0, "plans": state.get("plans", 0) + 1, "spent": meter.spent}

    def executor(state: PlanExecuteState) -> PlanExecuteState:
        step = state["plan"][state["done"]]
        results = state.get("results", [])
        task = EXECUTOR_TASK.format(question=state["question"], results=_listed(results), step=step)
        with Meter() as meter:
            reply = caller.invoke([SystemMessage(EXECUTOR), HumanMessage(task)])
            meter.count(reply)
            made = [_carry_out(step, call, by_name) for call in getattr(reply, "tool_calls", [])]
        if not made:
            made = [StepResult(step=step, tool="", input={}, output=f"no tool was called: {reply.text}", failed=True)]
        return {"results": made, "done": state["done"] + 1, "spent": meter.spent}

    def finisher(state: PlanExecuteState) -> PlanExecuteState:
        stopped = _stop(state)
        task = FINISHER_TASK.format(question=state["question"], results=_listed(state.get("results", [])))
        if stopped:
            task += f"\n\nNot everything was done: {stopped}. Say what is certain and what is missing."
        with Meter() as meter:
            reply = llm.invoke([SystemMessage(FINISHER), HumanMessage(task)])
            meter.count(reply)
        return {"answer": reply.text.strip(), "stopped": stopped or "", "spent": meter.spent}

    def _stop(state: PlanExecuteState) -> str | None:
        unfinished = state["results"][-1]["failed"] or state["done"] < len(state["plan"])
        if not unfinished:
            return None
        if len(state["results"]) >= max_steps:
            return f"the limit of {max_steps} steps is reached"
        if state["results"][-1]["failed"] and state["plans"] >= max_plans:
            return f"the limit of {max_plans} plans is reached"
        return limits.reached(state.get("spent"))

    def after_step(state: PlanExecuteState) -> Literal["executor", "planner", "finisher"]:
        if _stop(state):
            return "finisher"
        if state["results"][-1]["failed"]:
            return "planner"
        return "executor" if state["done"] < len(state["plan"]) else "finisher"

    builder = StateGraph(PlanExecuteState)
    builder.add_node("planner", planner)
    # A tool says by itself what went wrong; what it raises all the same may pass, such as a connection that is lost.
    builder.add_node("executor", executor, retry_policy=RetryPolicy(max_attempts=2))
    builder.add_node("finisher", finisher)
    builder.add_edge(START, "planner")
    builder.add_edge("planner", "executor")
    builder.add_conditional_edges("executor", after_step)
    builder.add_edge("finisher", END)
    return builder.compile(checkpointer=checkpointer)


def graph() -> CompiledStateGraph[PlanExecuteState, None, PlanExecuteState, PlanExecuteState]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_plan_execute(default_llm(POLICIES), [template("tools", "calculator").calculator])


def parse_plan(text: str) -> list[str]:
    """The items of the first list after the last "Plan:" line (of the whole text, if there is no such line).

    Numbered items count, or bullets where nothing is numbered. What stands below an item belongs to it, up to a
    blank line; other text after a blank line ends the list.
    """
    headings = list(re.finditer(r"^[#*\s]*plan\b[*\s]*:?[*\s]*$", text, re.IGNORECASE | re.MULTILINE))
    if headings:
        text = text[headings[-1].end() :]
    for mark in (r"\d+[.)]", r"[-*•]"):
        items: list[str] = []
        after_blank = False
        for line in text.splitlines():
            if item := re.match(rf"\s*{mark}\s+(.*\S)", line):
                items.append(item[1])
            elif items and line.strip():
                if after_blank:
                    break
                items[-1] += " " + line.strip()
            after_blank = not line.strip()
        if items:
            return items
    return []


def _carry_out(step: str, call: Any, tools: dict[str, BaseTool]) -> StepResult:
    result = StepResult(step=step, tool=call["name"], input=call["args"], output="", failed=True)
    if call["name"] not in tools:
        return {**result, "output": f"there is no tool {call['name']}"}
    try:
        message: ToolMessage = tools[call["name"]].invoke({**call, "type": "tool_call"})
    except ValueError as error:  # arguments that do not fit the tool's schema
        return {**result, "output": f"wrong arguments: {error}"}
    return {**result, "output": message.text, "failed": message.status == "error"}


def _listed(results: Sequence[StepResult]) -> str:
    lines = []
    for number, result in enumerate(results, 1):
        arguments = ", ".join(str(value) for value in result["input"].values())
        problem = "failed: " if result["failed"] else ""
        lines.append(f"{number}. {result['step']}\n   {arguments} = {problem}{result['output']}")
    return "\n".join(lines) or "none yet"
