"""LLMCompiler: tools run while the plan is still being written (Kim et al., 2024, arXiv 2312.04511).

    planner ──▶ worker ×n (calls that are left, at once) ──▶ … ──▶ joiner ──▶ answer
     ║ ▲                                                             │
     ║ └──────────────── what failed, or is missing ─────────────────┘
     ╚═▶ each call as soon as its line is committed and what it needs is there

The plan's lines are tool calls; where there is a calculator, they may be calculations in words ("2. Total: result 1 +
60"). Those that stand, while the next are being written, start tools; nothing that is only speculated ever acts. The
planner lists: lenient ("balanced"), and a step of its reply is a line. The joiner answers or says what is missing:
strict.

    from lookahead_agent import ChatLookahead
    llm = ChatLookahead(policies={"planner": r"balanced:delimiter=/\n+/", "joiner": "strict"})
    graph = build_llm_compiler(llm, [calculator])
    graph.invoke({"question": "..."})["answer"]

A planner that is killed plans again when the graph goes on, and its calls are made again. What must not happen twice,
or not without being asked about, is named in `ask_before`: such calls are made by a worker, from the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Annotated

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, BaseMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from lookahead_agent.agents.approval import check_ask_before, refusal_of
from lookahead_agent.agents.both_ways import BothWays, ask, call_tool, stream
from lookahead_agent.agents.budget import Budget, Usage, UsageMeter, add_usage
from lookahead_agent.agents.calculations import (
    PlanReader,
    calculator_among,
    calculator_arguments,
    with_placeholders,
)
from lookahead_agent.agents.early_calls import CallResult, EarlyCalls, ready_call
from lookahead_agent.agents.few_shot import worked_plans
from lookahead_agent.agents.planned_calls import PlannedCall, read_call
from lookahead_agent.agents.templates import default_llm, template
from lookahead_agent.agents.tool_use import ToolOutcome, use_tool

PLANNER = """You plan how to solve a problem with tools, of which there are:
{tools}

First think about the problem in a few short thoughts, with a blank line between thoughts: what is given, what is \
asked, and which calls lead there. Do not work out results.

Then write the plan, one call per line, the last one giving the answer. $1 stands for the result of call 1, so write \
amounts of money without a sign:

Plan:
{example}"""

REPLANNER = """The plan so far was:
{results}

{missing}

Write a new plan for what is still missing, with numbers from 1, and put in the results that are known."""

JOINER = """You finish a task from the results of tool calls. Trust the results and do not calculate again. If they \
answer the problem, answer it in one short sentence. If they do not, write "Missing:" and what is still to be found \
out."""

JOINER_TASK = """Problem: {question}

Results, of which the last one is the final one:
{results}"""

_MISSING = re.compile(r"\W*missing\W*:\s*(.*)", re.IGNORECASE | re.DOTALL)

POLICIES = {"planner": r"balanced:delimiter=/\n+/", "joiner": "strict"}


def _in_order(before: list[CallResult], more: list[CallResult]) -> list[CallResult]:
    return sorted([*before, *more], key=lambda result: (result["call"]["plan"], result["call"]["number"]))


class LLMCompilerState(TypedDict, total=False):
    """The graph's state.

    Only `question` is given at the start. `plan` has the calls of the latest plan, `plans` says how often the planner
    ran, `results` what became of the calls that were made, in the order of plans and their lines, and `missing` what
    was wrong with the latest plan.
    """

    question: str
    plan: list[PlannedCall]
    plans: int
    results: Annotated[list[CallResult], _in_order]
    missing: str
    usage: Annotated[Usage, add_usage]
    answer: str
    stopped: str


class WorkerState(TypedDict):
    """What one worker is given: a call whose arguments are known."""

    call: PlannedCall


def build_llm_compiler(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    ask_before: Collection[str] = (),
    max_plans: int = 2,
    calculate: bool = True,
    budget: Budget | None = None,
) -> CompiledStateGraph[LLMCompilerState, None, LLMCompilerState, LLMCompilerState]:
    """Build the graph.

    Args:
        llm: Chat model.
        tools: What the plan may call; several run at once, in threads.
        checkpointer: Saves the state after every node; needed for `ask_before`.
        ask_before: Names of tools before which the graph stops and asks. It goes on with
            `Command(resume=True)`, or `Command(resume="why not")` if the call is not to be made.
        max_plans: How often the planner may run; it plans anew when a call failed or the joiner misses something.
        calculate: Whether lines may be calculations in words, if a tool is named "calculator" and takes one argument; a
            planner that has no other tool is told to write nothing else then.
        budget: What a run may cost.

    Raises:
        ValueError: No tools, a limit below 1, or `ask_before` names none of the tools, or has no checkpointer.
    """
    if not tools:
        raise ValueError("the plan needs at least one tool")
    if max_plans < 1:
        raise ValueError("max_plans is at least 1")
    by_name = {tool.name: tool for tool in tools}
    check_ask_before(ask_before, by_name, checkpointer)
    budget = budget or Budget()
    later = sorted(ask_before)
    calculator = calculator_among(tools) if calculate else None
    if calculator and len(tools) == 1:
        told = worked_plans()
    else:
        # Which tools there are besides, a planner has to think about.
        described = "\n".join(_described(tool) for tool in tools)
        told = [SystemMessage(PLANNER.format(tools=described, example=_example(tools[0])))]

    def carry_out(call: PlannedCall) -> ToolOutcome:
        # A tool that is only a coroutine is left to a worker.
        asked = (call["tool"], call["arguments"], f"call-{call['number']}")
        return use_tool(by_name, *asked, raised=(NotImplementedError,))

    async def planner(state: LLMCompilerState) -> LLMCompilerState:
        number = state.get("plans", 0) + 1
        task = state["question"]
        if number > 1:
            results = _listed(state.get("results", []))
            task += "\n\n" + REPLANNER.format(results=results, missing=state.get("missing", ""))
        plan: list[PlannedCall] = []
        reader = PlanReader()
        with UsageMeter() as meter:
            most = budget.steps_left(state.get("usage")) - 1  # without this reply
            async with EarlyCalls(carry_out, most=most, later=later) as early:
                async for line in _lines(llm, [*told, HumanMessage(task)], meter):
                    call = read_call(line, by_name, plan=number)
                    if call is None and calculator is not None:
                        call = _read_calculation(line, reader, calculator, number)
                    if call is not None and all(call["number"] != other["number"] for other in plan):
                        plan.append(call)
                        early.add(call)
        usage = add_usage(meter.usage, Usage(steps=len(early.results)))
        return {"plan": plan, "plans": number, "results": early.results, "usage": usage}

    async def worker(state: WorkerState) -> LLMCompilerState:
        call = state["call"]
        refusal = refusal_of(call["tool"], call["arguments"]) if call["tool"] in ask_before else None
        with UsageMeter() as meter:
            if refusal:
                outcome = ToolOutcome(f"not carried out: {refusal}", failed=True)
            else:
                outcome = await call_tool(by_name, call["tool"], call["arguments"], f"call-{call['number']}")
        result = CallResult(call=call, output=outcome.output, failed=outcome.failed)
        return {"results": [result], "usage": add_usage(meter.usage, Usage(steps=1))}

    async def gather(state: LLMCompilerState) -> LLMCompilerState:
        """Waits for all workers of a round."""
        return {}

    async def joiner(state: LLMCompilerState) -> LLMCompilerState:
        stopped = budget.reached(state.get("usage"))
        last_plan = state["plans"] >= max_plans
        if not stopped and not last_plan and (problem := _problem(state)):
            return {"missing": problem}
        task = JOINER_TASK.format(question=state["question"], results=_listed(state.get("results", [])))
        if stopped or last_plan:
            task += "\n\nNo more can be found out: say what is certain and what is missing." if _problem(state) else ""
        with UsageMeter() as meter:
            reply = await ask(llm, [SystemMessage(JOINER), HumanMessage(task)])
            meter.count(reply)
        missing = _MISSING.match(reply.text)
        if missing and not stopped and not last_plan:
            return {"missing": f"Missing: {missing[1].strip()}", "usage": meter.usage}
        return {"answer": reply.text.strip(), "missing": "", "stopped": stopped or "", "usage": meter.usage}

    def next_round(state: LLMCompilerState) -> list[Send] | str:
        """The calls that are left and whose inputs are known, all at once; the joiner, when there is none."""
        if budget.reached(state.get("usage")):
            return "joiner"
        made = _made(state)
        ready = [ready_call(call, made) for call in state["plan"] if call["number"] not in made]
        room = budget.steps_left(state.get("usage"))
        return [Send("worker", WorkerState(call=call)) for call in ready if call is not None][:room] or "joiner"

    def after_joiner(state: LLMCompilerState) -> str:
        return "planner" if state["missing"] else END

    builder = StateGraph(LLMCompilerState)
    builder.set_node_defaults(timeout=budget.node_timeout)
    builder.add_node("planner", BothWays(planner))
    builder.add_node("worker", BothWays(worker), input_schema=WorkerState)
    builder.add_node("gather", BothWays(gather))
    builder.add_node("joiner", BothWays(joiner))
    builder.add_edge(START, "planner")
    builder.add_conditional_edges("planner", next_round, ["worker", "joiner"])
    builder.add_edge("worker", "gather")
    builder.add_conditional_edges("gather", next_round, ["worker", "joiner"])
    builder.add_conditional_edges("joiner", after_joiner, ["planner", END])
    return builder.compile(checkpointer=checkpointer)


def graph() -> CompiledStateGraph[LLMCompilerState, None, LLMCompilerState, LLMCompilerState]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_llm_compiler(default_llm(POLICIES), [template("tools", "calculator").calculator])


async def _lines(llm: BaseChatModel, messages: Sequence[BaseMessage], meter: UsageMeter) -> AsyncGenerator[str]:
    """The reply's lines, each as soon as it is complete and stands."""
    reply: BaseMessageChunk | None = None
    rest = ""
    async with aclosing(stream(llm, messages)) as chunks:
        async for chunk in chunks:
            reply = chunk if reply is None else reply + chunk
            *complete, rest = (rest + chunk.text).split("\n")
            for line in complete:
                yield line
    yield rest
    if reply is not None:
        meter.count(reply)


def _read_calculation(line: str, reader: PlanReader, calculator: BaseTool, plan: int) -> PlannedCall | None:
    """The call in a line that is a calculation in words; None for another."""
    found = reader.calculation(line)
    if found is None:
        return None
    arguments = calculator_arguments(calculator, with_placeholders(found[1], "$"))
    return PlannedCall(plan=plan, number=found[0], tool=calculator.name, arguments=arguments)


def _made(state: LLMCompilerState) -> dict[int, CallResult]:
    """Results of the latest plan, by number."""
    latest = [result for result in state.get("results", []) if result["call"]["plan"] == state["plans"]]
    return {result["call"]["number"]: result for result in latest}


def _problem(state: LLMCompilerState) -> str | None:
    """What is wrong with the latest plan; None if every call was made and was well."""
    if not state["plan"]:
        return "There was no plan: its lines are calls of the tools."
    made = _made(state)
    failed = [number for number, result in made.items() if result["failed"]]
    left = [call["number"] for call in state["plan"] if call["number"] not in made]
    if not failed and not left:
        return None
    problems = [f"Call {number} failed." for number in sorted(failed)]
    return " ".join([*problems, *(f"Call {number} was not made." for number in left)])


def _described(tool: BaseTool) -> str:
    arguments = ", ".join(f"{name}: {kind.get('type', 'any')}" for name, kind in tool.args.items())
    return f"{tool.name}({arguments}): {tool.description}"


def _example(tool: BaseTool) -> str:
    if tool.name == "calculator":
        return '1. calculator("12 * 1.50")\n2. calculator("3 * 20")\n3. calculator("$1 + $2")'
    first = next(iter(tool.args), "")
    given = f'{first}="…"' if first else ""
    again = f'{first}="… $1 …"' if first else ""
    return f"1. {tool.name}({given})\n2. {tool.name}({again})"


def _listed(results: Sequence[CallResult]) -> str:
    lines = []
    for result in results:
        call = result["call"]
        arguments = ", ".join(json.dumps(value, ensure_ascii=False) for value in call["arguments"].values())
        problem = "failed: " if result["failed"] else ""
        lines.append(f"{call['number']}. {call['tool']}({arguments}) = {problem}{result['output']}")
    return "\n".join(lines) or "none"
