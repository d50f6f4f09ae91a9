"""Middleware that plans before it acts: the plan's calls are carried out as they stand by the agent's own tool node.

It keeps no state: it reads the messages behind the last question, so that a run goes on from any checkpoint.
"""

from collections.abc import Sequence
from typing import Any

from langchain.agents.middleware import ModelRequest, ModelResponse
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.tools import BaseTool

from lookahead_agent.agents.plans import MARKER, Conversation, PlanLine, PlanRun, plan_call, plan_form
from lookahead_agent.agents.prompts import describe_tools, lookahead_settings, warm
from lookahead_agent.agents.turns import RETRIES, Asked, Turn, TurnMiddleware

PLAN_NOW = """Now write "Plan:" and the numbered calls, in this form and nothing else:

Plan:
{form}"""

REPLANNER = """{question}

An earlier plan did not work. What was tried:

{results}

Write another plan for what is still missing."""

EXECUTOR = """You carry out one line of a plan by one tool call. Put in values from the question and the results."""

REPEATED_CALL = "this call has failed before: it is not made again"

RETRY_TASK = """Question: {question}

Results so far:

{results}

A call of {tool} failed:

{error}

Write a call without this fault."""

EXECUTOR_TASK = """Question: {question}

Results so far:

{results}

Call now, with values in place of results: {line}"""

# Behind results of several passages, a small model forgets a question before them.
FINISHER_TASK = """Results:

{results}

Question: {question}"""


class PlanMiddleware(TurnMiddleware):
    """Plans tool calls, has them carried out, and answers from their results.

    The planner writes thoughts, which its policy may speculate on, and behind "Plan:" one call per line, which only the
    target writes. A call runs as it stands once the results that it names are there. A model writes the calls of lines
    that leave something open, and writes a failed call anew, with its error and the tool's schema. The labels of the
    model's calls are "planner", "executor" and "finisher".

    Args:
        tools: The agent's tools.
        planner: System prompt with {tools} and {form}, which asks for "Plan:" and numbered calls.
        finisher: System prompt.
        max_plans: Plans of one question; a further one is made when a call failed in the end.
        ordered: Whether lines run in their order unless their tools are read-only; else only tools that declare
            `metadata={"readOnlyHint": False}` keep the order, and other lines wait for nothing but what they name.

    Raises:
        ValueError: No tools, or a limit out of its range.
    """

    name = "planning"

    def __init__(
        self, tools: Sequence[BaseTool], *, planner: str, finisher: str, max_plans: int = 1, ordered: bool = False
    ) -> None:
        super().__init__()
        if not tools:
            raise ValueError("a plan needs at least one tool")
        if max_plans < 1:
            raise ValueError("max_plans is at least 1")
        self.by_name = {tool.name: tool for tool in tools}
        self._form = plan_form(tools)
        self._planner = planner.format(tools=describe_tools(tools), form=self._form)
        self._finisher = finisher
        self._max_plans, self._ordered = max_plans, ordered

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Take the next turn: plan, calls, or answer."""
        told: list[BaseMessage] = []
        while True:
            said = Conversation.read([*request.messages, *told], self.by_name)
            run = said.plans[-1] if said.plans else None
            ready, line = (self._ready(run), self._next_open(run)) if run is not None else ([], None)
            again = len(said.plans) < self._max_plans and run is not None and run.failed
            if run is None or (again and not ready and line is None):
                asked, number = self._planner_request(request, said), len(said.plans) + 1
                plan, *more = (yield Asked(asked, plan=number)).result
                if MARKER not in plan.text:
                    now = Asked(self._plan_now_request(asked, plan), plan=number)
                    plan, *more = _joined(plan, (yield now).result)
                told += [_named(plan, "planner"), *more]
                if more:  # results: the middleware around this one fits them into the context before they are read
                    return ModelResponse(result=told)
                continue
            if ready:
                calls = [plan_call(len(said.plans), number, name, args) for number, name, args in ready]
                return ModelResponse(result=_with_calls(told, calls))
            if line is not None:
                reply, *_ = (yield Asked(self._executor_request(request, said, run, line))).result
                call = reply.tool_calls[0] if isinstance(reply, AIMessage) and reply.tool_calls else None
                if call is None:
                    told.append(AIMessage(reply.text, name="executor", additional_kwargs={"line": line.number}))
                    continue
                made = plan_call(len(said.plans), line.number, call["name"], call["args"])
                told.append(_named(reply, "executor", [made]))
                tried = [(before["name"], before["args"]) for before, _ in run.attempts.get(line.number, ())]
                if tried[-1:] == [(call["name"], call["args"])]:
                    told += [
                        ToolMessage(REPEATED_CALL, tool_call_id=made["id"], name=made["name"], status="error")
                        for _ in range(RETRIES)
                    ]
                    continue
                return ModelResponse(result=told)
            shown = "\n\n".join(run.shown() for run in said.plans)
            task = HumanMessage(FINISHER_TASK.format(question=said.question, results=shown))
            asked = _asking(request, "finisher", self._finisher, [*said.before, task])
            answer, *_ = (yield Asked(asked)).result
            conversation = [*said.before, HumanMessage(said.question), AIMessage(answer.text)]
            self.warm(request.model, conversation, request.system_message)
            return ModelResponse(result=[*told, answer])

    def warm(
        self, llm: object, conversation: Sequence[BaseMessage] = (), system_message: SystemMessage | None = None
    ) -> None:
        """Have a `ChatLookahead` read how prompts of the next question begin; see `ChatLookahead.warm`.

        Args:
            llm: The agent's model; others do nothing.
            conversation: Messages before the question.
            system_message: The agent's own.
        """
        for node, system in (("planner", self._planner), ("finisher", self._finisher)):
            warm(llm, [_behind(system_message, system), *conversation], node=node)

    def _waits(self, line: PlanLine, run: PlanRun) -> bool:
        """Whether a line needs results that are not there, or must not run before another."""
        results = run.results
        if not line.references <= results.keys():
            return True
        return any(
            other.number < line.number and other.number not in results and self._keep_order(other, line)
            for other in run.lines
        )

    def _keep_order(self, first: PlanLine, second: PlanLine) -> bool:
        hints = [
            (self.by_name[line.tool].metadata or {}).get("readOnlyHint") if line.tool is not None else None
            for line in (first, second)
        ]
        return hints != [True, True] if self._ordered else False in hints or None in (first.tool, second.tool)

    def _ready(self, run: PlanRun) -> list[tuple[int, str, dict[str, Any]]]:
        """Number, tool and arguments of the calls that can run as they stand, all at once."""
        ready = []
        for line in run.lines:
            if line.tool is None or run.tries(line) or self._waits(line, run):
                continue
            if (arguments := line.filled(run.results)) is not None:
                ready.append((line.number, line.tool, arguments))
                if self._keep_order(line, line):
                    break
        return ready

    def _next_open(self, run: PlanRun) -> PlanLine | None:
        """The first line whose call a model has to write: it leaves something open, or has failed."""
        missing = (line for line in run.lines if line.number not in run.results and run.tries(line) <= RETRIES)
        return next((line for line in missing if not self._waits(line, run)), None)

    def _planner_request(self, request: ModelRequest[Any], said: Conversation) -> ModelRequest[Any]:
        task = said.question
        if said.plans:
            shown = "\n\n".join(run.shown() for run in said.plans)
            task = REPLANNER.format(question=task, results=shown)
        return _asking(request, "planner", self._planner, [*said.before, HumanMessage(task)], (MARKER,))

    def _plan_now_request(self, asked: ModelRequest[Any], thoughts: BaseMessage) -> ModelRequest[Any]:
        """Ask for the plan that a model left out behind its thoughts."""
        now = HumanMessage(PLAN_NOW.format(form=self._form))
        settings = dict(asked.model_settings)
        if lookahead_settings(asked.model, node="planner"):
            settings["policy"] = "off"  # the whole reply is a plan, also where the model leaves out "Plan:" again
        return asked.override(messages=[*asked.messages, AIMessage(thoughts.text), now], model_settings=settings)

    def _executor_request(
        self, request: ModelRequest[Any], said: Conversation, run: PlanRun, line: PlanLine
    ) -> ModelRequest[Any]:
        parts = {"question": said.question, "results": run.shown(without=line)}
        if attempts := run.attempts.get(line.number):
            # Without the call: a small model would copy it.
            failed, result = attempts[-1]
            task = RETRY_TASK.format(**parts, tool=failed["name"], error=result.text)
        else:
            task = EXECUTOR_TASK.format(**parts, line=line.without_references())
        tools: list[BaseTool | dict[str, Any]] = [*self.by_name.values()]
        if line.tool is not None and run.tries(line) < 2:
            tools = [self.by_name[line.tool]]
        asked = _asking(request, "executor", EXECUTOR, [HumanMessage(task)])
        return asked.override(tools=tools, tool_choice="any")


def _asking(
    request: ModelRequest[Any], node: str, system: str, messages: list[AnyMessage], markers: Sequence[str] = ()
) -> ModelRequest[Any]:
    """A request without tools, behind the agent's own system prompt."""
    settings = request.model_settings | lookahead_settings(request.model, node=node, action_markers=markers)
    system_message = _behind(request.system_message, system)
    asked = request.override(system_message=system_message, messages=messages, model_settings=settings)
    return asked.override(tools=[], tool_choice=None)


def _behind(own: SystemMessage | None, system: str) -> SystemMessage:
    """A node's system text behind the agent's own."""
    return SystemMessage(f"{own.text}\n\n{system}" if own is not None else system)


def _named(reply: BaseMessage, name: str, calls: list[ToolCall] | None = None) -> AIMessage:
    changed: dict[str, Any] = {"name": name} | ({"tool_calls": calls} if calls is not None else {})
    assert isinstance(reply, AIMessage)
    return reply.model_copy(update=changed)


def _joined(thoughts: BaseMessage, replies: list[BaseMessage]) -> list[BaseMessage]:
    """The replies, of which the first begins with the thoughts, and has the marker."""
    plan, *more = replies
    said, _, lines = plan.text.strip().rpartition(MARKER)
    text = "\n\n".join(filter(None, [thoughts.text.strip(), said.strip(), f"{MARKER}\n{lines.strip()}"]))
    return [plan.model_copy(update={"content": text}), *more]


def _with_calls(told: list[BaseMessage], calls: list[ToolCall]) -> list[BaseMessage]:
    """The turn's messages with calls: in the planner's message, if that is the last one."""
    if told and isinstance(last := told[-1], AIMessage) and last.name == "planner":
        return [*told[:-1], _named(last, "planner", calls)]
    return [*told, AIMessage("", tool_calls=calls, name="executor")]
