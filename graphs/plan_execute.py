"""Plan and execute: a planner thinks and plans, executors carry out its steps with tools, a finisher answers.

    planner ──▶ executor ×n (steps that need nothing from each other, at once) ──▶ … ──▶ finisher
       ▲            │ (a step failed: plan anew)
       └────────────┘

A step waits for those before it, unless it names the results that it needs ("result 1") or has only numbers. With a
calculator, the graph carries out a step that is a calculation ("Total: result 1 + 60") without a model. The executor
turns any other step into a call. A planner whose only tool is a calculator sees worked examples and writes such steps
alone; with other tools it thinks first.

A plan in other words is the same plan, so the planner's policy is lenient; a line is a step. The executor only calls
tools, which are always the target's own: "off". The finisher answers: strict.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_plan_execute(llm, [calculator])
    graph.invoke({"question": "..."})["answer"]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolCall
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import RetryPolicy, Send
from typing_extensions import TypedDict

from lookahead_agent.agents.calculations import (
    PlanReader,
    calculation,
    calculator_arguments,
    fill_results,
    find_calculator,
    named_results,
)
from lookahead_agent.agents.few_shot import plan_examples
from lookahead_agent.agents.metrics import Budget, Usage, UsageMeter, add_usage
from lookahead_agent.agents.nodes import model_node, plain_node
from lookahead_agent.agents.templates import default_llm, template
from lookahead_agent.agents.tool_use import ToolOutcome, ause_tool, use_tool
from lookahead_agent.generation.tool_calls import invalid_call_text

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

POLICIES = {"planner": r"balanced:delimiter=/\n+/", "executor": "off", "finisher": "strict"}


class StepResult(TypedDict):
    """What became of a step: of which plan, its number in it, its text, and the tool that was called."""

    plan: int
    number: int
    step: str
    tool: str
    input: dict[str, Any]
    output: str
    failed: bool


def _in_order(before: list[StepResult], more: list[StepResult]) -> list[StepResult]:
    return sorted([*before, *more], key=lambda result: (result["plan"], result["number"]))


class PlanExecuteState(TypedDict, total=False):
    """The graph's state.

    Only `question` is given at the start. `plan` is the latest, `plans` how often the planner ran, and `results`
    everything that the tools returned, in the order of plans and their steps. `usage` is what the run has cost, and
    `stopped` says which limit ended it, if one did.
    """

    question: str
    plan: list[str]
    plans: int
    results: Annotated[list[StepResult], _in_order]
    usage: Annotated[Usage, add_usage]
    answer: str
    stopped: str


class ExecutorState(TypedDict):
    """What one executor is given: a step, and the results of those before it."""

    question: str
    plan: int
    number: int
    step: str
    results: list[StepResult]


def build_plan_execute(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    max_plans: int = 3,
    max_steps: int = 12,
    calculate: bool = True,
    budget: Budget | None = None,
) -> CompiledStateGraph[PlanExecuteState, None, PlanExecuteState, PlanExecuteState]:
    """Build the graph.

    Args:
        llm: Chat model that can call tools.
        tools: What the executor may call.
        checkpointer: Saves the state after every node, so that a run can be resumed by its thread id.
        max_plans: How often the planner may run; after a failed step it plans anew.
        max_steps: Steps that are carried out in all; the finisher answers with what there is then.
        calculate: Whether the graph carries out steps that are calculations, if a tool is named "calculator" and takes
            one argument; else the executor puts them into calls. A planner without other tools writes only such steps.
        budget: What a run may cost; the finisher answers with what there is then.

    Raises:
        ValueError: No tools, or a limit below 1.
    """
    if not tools:
        raise ValueError("the executor needs at least one tool")
    if max_plans < 1 or max_steps < 1:
        raise ValueError("max_plans and max_steps are at least 1")
    budget = budget or Budget()
    by_name = {tool.name: tool for tool in tools}
    caller = llm.bind_tools(list(tools), tool_choice="any")
    calculator = find_calculator(tools) if calculate else None
    # Which tools there are besides, a planner has to think about.
    alone = calculator is not None and len(tools) == 1
    told = plan_examples() if alone else [SystemMessage(PLANNER)]

    def planner_prompt(state: PlanExecuteState) -> list[BaseMessage]:
        task = state["question"]
        if results := state.get("results"):
            task += "\n\n" + REPLANNER.format(results=_listed(results))
        return [*told, HumanMessage(task)]

    def planner_update(state: PlanExecuteState, reply: AIMessage) -> PlanExecuteState:
        plan = parse_plan(reply.text) or [state["question"]]
        if calculator is not None:
            reader = PlanReader()
            plan = [reader.named_by_number(number, step) for number, step in enumerate(plan, 1)]
        return {"plan": plan, "plans": state.get("plans", 0) + 1}

    def calculation_of(state: ExecutorState) -> ToolCall | None:
        """The call of a step that is a calculation; None: the executor is to find out what to do."""
        known = {result["number"]: result["output"] for result in state["results"] if result["plan"] == state["plan"]}
        expression = fill_results(state["step"], known)
        if calculator is None or expression is None:
            return None
        arguments = calculator_arguments(calculator, expression)
        return ToolCall(name=calculator.name, args=arguments, id=f"step-{state['number']}")

    def executor_prompt(state: ExecutorState) -> list[BaseMessage]:
        results = _listed(state["results"])
        task = EXECUTOR_TASK.format(question=state["question"], results=results, step=state["step"])
        return [SystemMessage(EXECUTOR), HumanMessage(task)]

    def executor(state: ExecutorState) -> PlanExecuteState:
        meter, call = UsageMeter(), calculation_of(state)
        if call is not None and not (outcome := use_tool(by_name, call)).failed:
            return {"results": [_result(state, call, outcome)], "usage": meter.usage(steps=1)}
        reply = meter.count(caller.invoke(executor_prompt(state)))
        made = [_result(state, call, use_tool(by_name, call)) for call in reply.tool_calls]
        return {"results": [*made, *_not_made(state, reply)], "usage": meter.usage()}

    async def aexecutor(state: ExecutorState) -> PlanExecuteState:
        meter, call = UsageMeter(), calculation_of(state)
        if call is not None and not (outcome := await ause_tool(by_name, call)).failed:
            return {"results": [_result(state, call, outcome)], "usage": meter.usage(steps=1)}
        reply = meter.count(await caller.ainvoke(executor_prompt(state)))
        made = [_result(state, call, await ause_tool(by_name, call)) for call in reply.tool_calls]
        return {"results": [*made, *_not_made(state, reply)], "usage": meter.usage()}

    def gather(state: PlanExecuteState) -> PlanExecuteState:
        """Waits for all executors of a round."""
        return {}

    def finisher_prompt(state: PlanExecuteState) -> list[BaseMessage]:
        task = FINISHER_TASK.format(question=state["question"], results=_listed(state.get("results", [])))
        if stopped := _stop(state):
            task += f"\n\nNot everything was done: {stopped}. Say what is certain and what is missing."
        return [SystemMessage(FINISHER), HumanMessage(task)]

    def finisher_update(state: PlanExecuteState, reply: AIMessage) -> PlanExecuteState:
        return {"answer": reply.text.strip(), "stopped": _stop(state) or ""}

    def _stop(state: PlanExecuteState) -> str | None:
        failed = _failed(state)
        if not failed and not _left(state):
            return None
        if len(state.get("results", [])) >= max_steps:
            return f"the limit of {max_steps} steps is reached"
        if failed and state["plans"] >= max_plans:
            return f"the limit of {max_plans} plans is reached"
        return budget.reached(state.get("usage"))

    def next_round(state: PlanExecuteState) -> list[Send] | Literal["planner", "finisher"]:
        """The steps that need nothing of each other, all at once."""
        if _stop(state):
            return "finisher"
        if _failed(state):
            return "planner"
        left, results = _left(state), state.get("results", [])
        begun = left[0] if left else len(state["plan"]) + 1
        room = min(max_steps - len(results), budget.steps_left(state.get("usage")))
        ready = [number for number in left if needs_up_to(state["plan"][number - 1], number) < begun][:room]
        given = {"question": state["question"], "plan": state["plans"], "results": results}
        return [
            Send("executor", {**given, "number": number, "step": state["plan"][number - 1]}) for number in ready
        ] or "finisher"

    builder = StateGraph(PlanExecuteState)
    builder.set_node_defaults(timeout=budget.node_timeout)
    builder.add_node("planner", model_node(llm, planner_prompt, planner_update))
    # The executor's model may lose its connection. Its tools raise nothing, so that no call is made again.
    retry = RetryPolicy(max_attempts=2)
    builder.add_node("executor", RunnableLambda(executor, aexecutor), retry_policy=retry, input_schema=ExecutorState)
    builder.add_node("gather", plain_node(gather))
    builder.add_node("finisher", model_node(llm, finisher_prompt, finisher_update))
    builder.add_edge(START, "planner")
    builder.add_conditional_edges("planner", next_round, ["executor", "finisher"])
    builder.add_edge("executor", "gather")
    builder.add_conditional_edges("gather", next_round, ["executor", "planner", "finisher"])
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
        for line in text.split("\n"):
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


def needs_up_to(step: str, number: int) -> int:
    """Up to which step of the plan a step may need results: the highest that it names; 0 if it has only numbers.

    What says something else may mean any result, so it needs all steps before it.

    Args:
        step: The step's text, as "Total cost: result 1 + result 2".
        number: Its number in the plan, from 1.
    """
    named = named_results(step)
    expression = calculation(step)
    if expression is None or any(found >= number for found in named):
        return number - 1
    return max(named_results(expression), default=0)


def _latest(state: PlanExecuteState) -> list[StepResult]:
    return [result for result in state.get("results", []) if result["plan"] == state["plans"]]


def _failed(state: PlanExecuteState) -> bool:
    return any(result["failed"] for result in _latest(state))


def _left(state: PlanExecuteState) -> list[int]:
    """Numbers of the plan's steps that were not carried out."""
    done = {result["number"] for result in _latest(state)}
    return [number for number in range(1, len(state["plan"]) + 1) if number not in done]


def _result(state: ExecutorState, call: ToolCall, outcome: ToolOutcome) -> StepResult:
    return StepResult(
        plan=state["plan"],
        number=state["number"],
        step=state["step"],
        tool=call["name"],
        input=call["args"],
        output=outcome.output,
        failed=outcome.failed,
    )


def _not_made(state: ExecutorState, reply: AIMessage) -> list[StepResult]:
    """Results of the calls that cannot be read, or of a reply that calls nothing."""
    problems = [(call.get("name") or "", invalid_call_text(call)) for call in reply.invalid_tool_calls]
    if not reply.tool_calls and not problems:
        problems = [("", reply.text)]
    return [
        _result(
            state, ToolCall(name=name, args={}, id=None), ToolOutcome(f"no tool was called: {problem}", failed=True)
        )
        for name, problem in problems
    ]


def _listed(results: Sequence[StepResult]) -> str:
    lines = []
    for number, result in enumerate(results, 1):
        arguments = ", ".join(str(value) for value in result["input"].values())
        problem = "failed: " if result["failed"] else ""
        lines.append(f"{number}. {result['step']}\n   {arguments} = {problem}{result['output']}")
    return "\n".join(lines) or "none yet"
