"""ReWOO: plan all tool calls once, with placeholders, carry them out, and solve (Xu et al., 2023).

    planner ──▶ caller ──▶ worker ×n (those whose inputs are known, at once) ──▶ … ──▶ solver

One long thought instead of many short ones: the planner is where the time goes, and where lookahead gains. It only
thinks, so it may be "balanced"; a step of its reply is a line. The caller puts its plan into calls, JSON by schema and
so the target's own. A plan of nothing but calculations ("2. Total: result 1 + 60") is read as it stands, where there is
a calculator: no reply is needed for that. The solver answers, so it is strict.

    from lookahead_agent import ChatLookahead
    llm = ChatLookahead(policies={"planner": r"balanced:delimiter=/\n+/", "solver": "strict"})
    graph = build_rewoo(llm, [calculator])
    graph.invoke({"question": "..."})["answer"]
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Sequence
from typing import Annotated, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from lookahead_agent.agents.both_ways import BothWays, ask, call_tool
from lookahead_agent.agents.budget import Budget, Usage, UsageMeter, add_usage
from lookahead_agent.agents.calculations import (
    PlanReader,
    calculator_among,
    calculator_arguments,
    with_placeholders,
)
from lookahead_agent.agents.few_shot import worked_plans
from lookahead_agent.agents.planned_calls import in_texts
from lookahead_agent.agents.templates import default_llm, template

PLANNER = """You plan how to solve a problem with tools, of which there are:
{tools}

Think in a few short thoughts, with a blank line between thoughts: what is given, what is asked, and which calls lead \
there. Do not work out results. Then write the plan, one call per line, the last one giving the answer:

1. Cost of the pens: 12 * 1.50
2. Cost of everything: result 1 + 60"""

CALLER = """You put a plan into tool calls, one for each line of it, in its order. An argument that needs the result \
of call 1 has #E1 in its place, that of call 2 #E2, and so on. The tools are:
{tools}"""

UNREADABLE = """That could not be read ({error}). Write all calls again, as short as you can."""

SOLVER = """You answer a problem from results that were already found. Trust the results and do not calculate again. \
Answer in one short sentence."""

_REFERENCE = re.compile(r"#E([0-9]{1,4})(?![0-9])")

POLICIES = {"planner": r"balanced:delimiter=/\n+/", "caller": "off", "solver": "strict"}


class PlannedCall(TypedDict):
    """A tool call whose arguments may name the results of others."""

    number: int
    tool: str
    arguments: dict[str, Any]


class Evidence(TypedDict):
    """What a call found."""

    call: PlannedCall
    output: str
    failed: bool


class RewooState(TypedDict, total=False):
    """The graph's state; only `question` is given at the start."""

    question: str
    thoughts: str
    plan: list[PlannedCall]
    evidence: Annotated[list[Evidence], operator.add]
    usage: Annotated[Usage, add_usage]
    answer: str
    stopped: str


class WorkerState(TypedDict):
    """What one worker is given: a call whose arguments are known."""

    call: PlannedCall


def build_rewoo(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    calculate: bool = True,
    budget: Budget | None = None,
) -> CompiledStateGraph[RewooState, None, RewooState, RewooState]:
    """Build the graph.

    Args:
        llm: Chat model.
        tools: What the plan may call.
        checkpointer: Saves the state after every node.
        calculate: Whether a plan of nothing but calculations is read as it stands, if a tool is named "calculator" and
            takes one argument; else the caller puts it into calls.
        budget: What a run may cost.

    Raises:
        ValueError: No tools.
    """
    if not tools:
        raise ValueError("the plan needs at least one tool")
    by_name = {tool.name: tool for tool in tools}
    budget = budget or Budget()
    described = "\n".join(_described(tool) for tool in tools)
    calculator = calculator_among(tools) if calculate else None
    # Which tools there are besides, a planner has to think about.
    alone = calculator is not None and len(tools) == 1
    told = worked_plans() if alone else [SystemMessage(PLANNER.format(tools=described))]
    writer = llm.with_structured_output(_schema(tools), include_raw=True)

    async def planner(state: RewooState) -> RewooState:
        with UsageMeter() as meter:
            reply = await ask(llm, [*told, HumanMessage(state["question"])])
            meter.count(reply)
        return {"thoughts": reply.text.strip(), "usage": meter.usage}

    async def caller(state: RewooState) -> RewooState:
        if calculator is not None and (read := _calculations(state["thoughts"], calculator)):
            return {"plan": read, "stopped": ""}
        task = f"Problem: {state['question']}\n\nPlan:\n{state['thoughts']}"
        asked: list[AnyMessage] = [SystemMessage(CALLER.format(tools=described)), HumanMessage(task)]
        with UsageMeter() as meter:
            for last in (False, True):
                written: Any = await ask(writer, asked)
                meter.count(written["raw"])
                error = str(written["parsing_error"] or "").split("\n")[0][:200]
                if not error or last:
                    break
                asked += [written["raw"], HumanMessage(UNREADABLE.format(error=error))]
        stopped = f"the calls could not be read: {error}" if error else ""
        return {"plan": _calls(written["parsed"]), "stopped": stopped, "usage": meter.usage}

    async def worker(state: WorkerState) -> RewooState:
        with UsageMeter() as meter:
            evidence = await _carry_out(state["call"], by_name)
        return {"evidence": [evidence], "usage": add_usage(meter.usage, Usage(steps=1))}

    async def gather(state: RewooState) -> RewooState:
        """Waits for all workers of a round."""
        return {}

    async def solver(state: RewooState) -> RewooState:
        stopped = budget.reached(state.get("usage")) or state.get("stopped")
        with UsageMeter() as meter:
            found = _listed(state)
            note = (
                f"\n\nNot all calls were made: {stopped}. Say what is certain and what is missing." if stopped else ""
            )
            task = f"Problem: {state['question']}\n\nResults, of which the last one is the final one:\n{found}{note}"
            reply = await ask(llm, [SystemMessage(SOLVER), HumanMessage(task)])
            meter.count(reply)
        return {"answer": reply.text.strip(), "stopped": stopped or "", "usage": meter.usage}

    def next_round(state: RewooState) -> list[Send] | str:
        """The calls whose inputs are known, all at once; the solver, when there is none."""
        outputs = {entry["call"]["number"]: entry for entry in state.get("evidence", [])}
        if budget.reached(state.get("usage")):
            return "solver"
        ready = []
        for call in state["plan"]:
            needed = _needed(call)
            if call["number"] in outputs or not needed <= outputs.keys():
                continue
            if any(outputs[number]["failed"] for number in needed):
                continue
            results = {number: outputs[number]["output"] for number in needed}
            ready.append(Send("worker", WorkerState(call=_filled(call, results))))
        return ready or "solver"

    builder = StateGraph(RewooState)
    builder.set_node_defaults(timeout=budget.node_timeout)
    builder.add_node("planner", BothWays(planner))
    builder.add_node("caller", BothWays(caller))
    builder.add_node("worker", BothWays(worker), input_schema=WorkerState)
    builder.add_node("gather", BothWays(gather))
    builder.add_node("solver", BothWays(solver))
    builder.add_edge(START, "planner")
    builder.add_edge("planner", "caller")
    builder.add_conditional_edges("caller", next_round, ["worker", "solver"])
    builder.add_edge("worker", "gather")
    builder.add_conditional_edges("gather", next_round, ["worker", "solver"])
    builder.add_edge("solver", END)
    return builder.compile(checkpointer=checkpointer)


def graph() -> CompiledStateGraph[RewooState, None, RewooState, RewooState]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_rewoo(default_llm(POLICIES), [template("tools", "calculator").calculator])


def _schema(tools: Sequence[BaseTool]) -> dict[str, Any]:
    """JSON schema of a list of calls, whose arguments may also be texts with placeholders."""
    calls = []
    for tool in tools:
        function = convert_to_openai_tool(tool)["function"]
        properties = {
            name: {"anyOf": [kind, {"type": "string"}]} if kind.get("type") != "string" else kind
            for name, kind in function["parameters"]["properties"].items()
        }
        arguments = {"type": "object", "properties": properties, "additionalProperties": False}
        arguments["required"] = function["parameters"].get("required", [])
        calls.append(
            {
                "type": "object",
                "properties": {"tool": {"const": function["name"]}, "arguments": arguments},
                "required": ["tool", "arguments"],
                "additionalProperties": False,
            }
        )
    return {
        "title": "calls",
        "description": "Tool calls.",
        "type": "object",
        "properties": {"calls": {"type": "array", "items": {"anyOf": calls}}},
        "required": ["calls"],
    }


def _calls(parsed: Any) -> list[PlannedCall]:
    """The planned calls; none, if the model wrote none that can be read."""
    match parsed:
        case {"calls": [*listed]}:
            # The number of one that cannot be read stays unused, so that those that need its result are not made.
            return [
                PlannedCall(number=number, tool=str(call["tool"]), arguments=dict(call["arguments"]))
                for number, call in enumerate(listed, 1)
                if isinstance(call, dict) and "tool" in call and isinstance(call.get("arguments"), dict)
            ]
        case _:
            return []


def _calculations(plan: str, calculator: BaseTool) -> list[PlannedCall]:
    """The calls of a plan of which every line is a calculation; none of any other."""
    reader = PlanReader()
    lines = [reader.calculation(line) for line in plan.split("\n") if line.strip()]
    known = [line for line in lines if line is not None]
    if len(known) < len(lines) or [number for number, _ in known] != list(range(1, len(known) + 1)):
        return []
    return [
        PlannedCall(
            number=number,
            tool=calculator.name,
            arguments=calculator_arguments(calculator, with_placeholders(expression, "#E")),
        )
        for number, expression in known
    ]


def _needed(call: PlannedCall) -> set[int]:
    return {int(number) for number in _REFERENCE.findall(json.dumps(call["arguments"]))}


def _filled(call: PlannedCall, results: dict[int, str]) -> PlannedCall:
    def fill(text: str) -> str:
        return _REFERENCE.sub(lambda match: results[int(match[1])], text)

    return PlannedCall(number=call["number"], tool=call["tool"], arguments=in_texts(call["arguments"], fill))


async def _carry_out(call: PlannedCall, tools: dict[str, BaseTool]) -> Evidence:
    outcome = await call_tool(tools, call["tool"], call["arguments"], f"E{call['number']}")
    return Evidence(call=call, output=outcome.output, failed=outcome.failed)


def _described(tool: BaseTool) -> str:
    function = convert_to_openai_tool(tool)["function"]
    return (
        f"{function['name']}: {function['description']} Arguments: {json.dumps(function['parameters']['properties'])}"
    )


def _listed(state: RewooState) -> str:
    lines = []
    for entry in sorted(state.get("evidence", []), key=lambda entry: entry["call"]["number"]):
        problem = "failed: " if entry["failed"] else ""
        arguments = ", ".join(str(value) for value in entry["call"]["arguments"].values())
        lines.append(f"#E{entry['call']['number']}: {arguments} = {problem}{entry['output']}")
    return "\n".join(lines) or "none"
