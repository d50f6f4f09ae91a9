"""LLMCompiler: tools run while the plan is still being written (Kim et al., 2024, arXiv 2312.04511).

    planner ──▶ worker ×n (calls that are left, at once) ──▶ … ──▶ joiner ──▶ answer
     ║ ▲                                                             │
     ║ └──────────────── what failed, or is missing ─────────────────┘
     ╚═▶ each call as soon as its line is committed and what it needs is there

The plan's lines are tool calls. With a calculator they may be calculations in words ("2. Total: result 1 + 60").
Committed lines start tools while the planner writes the next ones; a speculated line never acts. The planner has a
lenient policy, and a line is a step. The joiner answers or names what is missing: strict.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_llm_compiler(llm, [calculator])
    graph.invoke({"question": "..."})["answer"]

A planner that is killed plans again when the graph goes on, and makes its calls again. Name tools that must not run
twice in `ask_before`: a worker makes their calls, from the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import aclosing, closing
from typing import Annotated, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolCall
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool
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
from lookahead_agent.agents.planned_calls import CallResult, EarlyCalls, PlannedCall, read_call, ready_call
from lookahead_agent.agents.templates import default_llm, template
from lookahead_agent.agents.tool_use import ToolOutcome, ask_or_call, check_ask_before, use_tool

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
    calculator = find_calculator(tools) if calculate else None
    if calculator and len(tools) == 1:
        told = plan_examples()
    else:
        # Which tools there are besides, a planner has to think about.
        described = "\n".join(_described(tool) for tool in tools)
        told = [SystemMessage(PLANNER.format(tools=described, example=_example(tools[0])))]

    def carry_out(call: PlannedCall) -> ToolOutcome:
        # A tool that is only a coroutine is left to a worker.
        return use_tool(by_name, _tool_call(call), raised=(NotImplementedError,))

    def planner_prompt(state: LLMCompilerState) -> list[BaseMessage]:
        task = state["question"]
        if state.get("plans"):
            results = _listed(state.get("results", []))
            task += "\n\n" + REPLANNER.format(results=results, missing=state.get("missing", ""))
        return [*told, HumanMessage(task)]

    def reader_of(state: LLMCompilerState) -> _PlanReader:
        return _PlanReader(state.get("plans", 0) + 1, by_name, calculator)

    def early_calls(state: LLMCompilerState) -> EarlyCalls:
        return EarlyCalls(carry_out, most=budget.steps_left(state.get("usage")) - 1, later=later)  # without this reply

    def planner_update(reader: _PlanReader, results: list[CallResult], meter: UsageMeter) -> LLMCompilerState:
        meter.count(reader.reply)
        return {"plan": reader.plan, "plans": reader.number, "results": results, "usage": meter.usage(len(results))}

    def planner(state: LLMCompilerState) -> LLMCompilerState:
        meter, reader = UsageMeter(), reader_of(state)
        stream: Any = llm.stream(planner_prompt(state))
        with early_calls(state) as early, closing(stream) as chunks:
            for chunk in chunks:
                early.add(*reader.read(chunk))
            early.add(*reader.end())
        return planner_update(reader, early.results, meter)

    async def aplanner(state: LLMCompilerState) -> LLMCompilerState:
        meter, reader = UsageMeter(), reader_of(state)
        stream: Any = llm.astream(planner_prompt(state))
        async with early_calls(state) as early, aclosing(stream) as chunks:
            async for chunk in chunks:
                early.add(*reader.read(chunk))
            early.add(*reader.end())
        return planner_update(reader, early.results, meter)

    def calls_of(state: WorkerState) -> list[ToolCall | ToolOutcome]:
        return [ask_or_call(_tool_call(state["call"]), ask_before)]

    def worker_update(state: WorkerState, outcomes: list[ToolOutcome]) -> LLMCompilerState:
        return {"results": [CallResult(call=state["call"], output=outcomes[0].output, failed=outcomes[0].failed)]}

    def gather(state: LLMCompilerState) -> LLMCompilerState:
        """Waits for all workers of a round."""
        return {}

    def ends(state: LLMCompilerState) -> bool:
        return bool(budget.reached(state.get("usage"))) or state["plans"] >= max_plans

    def joiner_prompt(state: LLMCompilerState) -> list[BaseMessage] | AIMessage:
        problem = _problem(state)
        if problem and not ends(state):
            return AIMessage(problem)
        task = JOINER_TASK.format(question=state["question"], results=_listed(state.get("results", [])))
        task += "\n\nNo more can be found out: say what is certain and what is missing." if problem else ""
        return [SystemMessage(JOINER), HumanMessage(task)]

    def joiner_update(state: LLMCompilerState, reply: AIMessage) -> LLMCompilerState:
        if not ends(state):
            if problem := _problem(state):
                return {"missing": problem}
            if missing := _MISSING.match(reply.text):
                return {"missing": f"Missing: {missing[1].strip()}"}
        return {"answer": reply.text.strip(), "missing": "", "stopped": budget.reached(state.get("usage")) or ""}

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
    builder.add_node("planner", RunnableLambda(planner, aplanner))
    builder.add_node("worker", tool_node(by_name, calls_of, worker_update), input_schema=WorkerState)
    builder.add_node("gather", plain_node(gather))
    builder.add_node("joiner", model_node(llm, joiner_prompt, joiner_update))
    builder.add_edge(START, "planner")
    builder.add_conditional_edges("planner", next_round, ["worker", "joiner"])
    builder.add_edge("worker", "gather")
    builder.add_conditional_edges("gather", next_round, ["worker", "joiner"])
    builder.add_conditional_edges("joiner", after_joiner, ["planner", END])
    return builder.compile(checkpointer=checkpointer)


def graph() -> CompiledStateGraph[LLMCompilerState, None, LLMCompilerState, LLMCompilerState]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_llm_compiler(default_llm(POLICIES), [template("tools", "calculator").calculator])


class _PlanReader:
    """Reads the calls of a plan as its reply comes: each as soon as its line is committed.

    Args:
        number: The plan's: 1, and more where it is planned anew.
        tools: Tools by name.
        calculator: For lines that are calculations in words; None: there are none.
    """

    def __init__(self, number: int, tools: dict[str, BaseTool], calculator: BaseTool | None) -> None:
        self.number = number
        self.plan: list[PlannedCall] = []
        self.reply = AIMessageChunk(content="")
        self._tools = tools
        self._calculator = calculator
        self._calculations = PlanReader()
        self._rest = ""

    def read(self, chunk: AIMessageChunk) -> list[PlannedCall]:
        """The calls that are complete with this chunk."""
        self.reply += chunk
        *complete, self._rest = (self._rest + chunk.text).split("\n")
        return [call for line in complete for call in self._calls(line)]

    def end(self) -> list[PlannedCall]:
        """The call of the last line."""
        return self._calls(self._rest)

    def _calls(self, line: str) -> list[PlannedCall]:
        call = read_call(line, self._tools, plan=self.number)
        found = self._calculations.calculation(line) if call is None and self._calculator is not None else None
        if found is not None and self._calculator is not None:
            arguments = calculator_arguments(self._calculator, with_placeholders(found[1], "$"))
            call = PlannedCall(plan=self.number, number=found[0], tool=self._calculator.name, arguments=arguments)
        if call is None or any(call["number"] == other["number"] for other in self.plan):
            return []
        self.plan.append(call)
        return [call]


def _tool_call(call: PlannedCall) -> ToolCall:
    return ToolCall(name=call["tool"], args=call["arguments"], id=f"call-{call['number']}")


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
