"""ReWOO: plan all tool calls once, with placeholders, carry them out, and solve (Xu et al., 2023).

    planner ──▶ caller ──▶ worker ×n (those whose inputs are known, at once) ──▶ … ──▶ solver

The planner writes one long thought in place of many short ones, and takes most of the time. Its policy is lenient, and
a line is a step. The caller puts the plan into calls, JSON by schema and so the target's own. With a calculator, a plan
that has only calculations ("2. Total: result 1 + 60") needs no caller. The solver answers: strict.

    llm = ChatLookahead(policies=POLICIES)
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
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolCall
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from lookahead_agent.agents.calculations import (
    PlanReader,
    calculator_arguments,
    find_calculator,
    with_placeholders,
)
from lookahead_agent.agents.few_shot import plan_examples
from lookahead_agent.agents.metrics import Budget, Usage, UsageMeter, add_usage
from lookahead_agent.agents.nodes import model_node, plain_node, tool_node
from lookahead_agent.agents.planned_calls import in_texts
from lookahead_agent.agents.templates import default_llm, template
from lookahead_agent.agents.tool_use import ToolOutcome

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
        calculate: Whether a plan that has only calculations needs no caller, if a tool is named "calculator" and takes
            one argument.
        budget: What a run may cost.

    Raises:
        ValueError: No tools.
    """
    if not tools:
        raise ValueError("the plan needs at least one tool")
    by_name = {tool.name: tool for tool in tools}
    budget = budget or Budget()
    described = "\n".join(_described(tool) for tool in tools)
    calculator = find_calculator(tools) if calculate else None
    # Which tools there are besides, a planner has to think about.
    alone = calculator is not None and len(tools) == 1
    told = plan_examples() if alone else [SystemMessage(PLANNER.format(tools=described))]
    writer = llm.with_structured_output(_schema(tools), include_raw=True)

    def planner_prompt(state: RewooState) -> list[BaseMessage]:
        return [*told, HumanMessage(state["question"])]

    def planner_update(state: RewooState, reply: AIMessage) -> RewooState:
        return {"thoughts": reply.text.strip()}

    def caller_prompt(state: RewooState) -> list[BaseMessage]:
        task = f"Problem: {state['question']}\n\nPlan:\n{state['thoughts']}"
        return [SystemMessage(CALLER.format(tools=described)), HumanMessage(task)]

    def caller_update(reply: dict[str, Any], usage: Usage) -> RewooState:
        error = _unreadable(reply)
        stopped = f"the calls could not be read: {error}" if error else ""
        return {"plan": _calls(reply["parsed"]), "stopped": stopped, "usage": usage}

    def caller(state: RewooState) -> RewooState:
        if calculator is not None and (read := _calculations(state["thoughts"], calculator)):
            return {"plan": read, "stopped": ""}
        meter, asked = UsageMeter(), caller_prompt(state)
        reply: Any = meter.count(writer.invoke(asked))
        if error := _unreadable(reply):
            asked = [*asked, reply["raw"], HumanMessage(UNREADABLE.format(error=error))]
            reply = meter.count(writer.invoke(asked))
        return caller_update(reply, meter.usage())

    async def acaller(state: RewooState) -> RewooState:
        if calculator is not None and (read := _calculations(state["thoughts"], calculator)):
            return {"plan": read, "stopped": ""}
        meter, asked = UsageMeter(), caller_prompt(state)
        reply: Any = meter.count(await writer.ainvoke(asked))
        if error := _unreadable(reply):
            asked = [*asked, reply["raw"], HumanMessage(UNREADABLE.format(error=error))]
            reply = meter.count(await writer.ainvoke(asked))
        return caller_update(reply, meter.usage())

    def calls_of(state: WorkerState) -> list[ToolCall]:
        call = state["call"]
        return [ToolCall(name=call["tool"], args=call["arguments"], id=f"E{call['number']}")]

    def worker_update(state: WorkerState, outcomes: list[ToolOutcome]) -> RewooState:
        return {"evidence": [Evidence(call=state["call"], output=outcomes[0].output, failed=outcomes[0].failed)]}

    def gather(state: RewooState) -> RewooState:
        """Waits for all workers of a round."""
        return {}

    def solver_prompt(state: RewooState) -> list[BaseMessage]:
        stopped = budget.reached(state.get("usage")) or state.get("stopped")
        note = f"\n\nNot all calls were made: {stopped}. Say what is certain and what is missing." if stopped else ""
        results = f"Results, of which the last one is the final one:\n{_listed(state)}{note}"
        return [SystemMessage(SOLVER), HumanMessage(f"Problem: {state['question']}\n\n{results}")]

    def solver_update(state: RewooState, reply: AIMessage) -> RewooState:
        stopped = budget.reached(state.get("usage")) or state.get("stopped")
        return {"answer": reply.text.strip(), "stopped": stopped or ""}

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
    builder.add_node("planner", model_node(llm, planner_prompt, planner_update))
    builder.add_node("caller", RunnableLambda(caller, acaller))
    builder.add_node("worker", tool_node(by_name, calls_of, worker_update), input_schema=WorkerState)
    builder.add_node("gather", plain_node(gather))
    builder.add_node("solver", model_node(llm, solver_prompt, solver_update))
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


def _unreadable(reply: dict[str, Any]) -> str:
    """Why the calls could not be read; empty if they could."""
    return str(reply["parsing_error"] or "").split("\n")[0][:200]


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
