"""Middleware that plans before it acts: the agent's own tool node executes the plan's calls as written.

It keeps no state of its own. It reads the messages of the run, so a run resumes from any checkpoint.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain.agents.middleware import ModelRequest, ModelResponse, ToolCallRequest
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.tools import BaseTool

from lookahead_agent.agents.plans import (
    EXECUTED,
    MARKER,
    SHOWN_LENGTH,
    Conversation,
    PlanLine,
    PlanRun,
    PlanTools,
    exact_results,
    format_plans,
    plan_form,
    results_of,
    shorten,
)
from lookahead_agent.agents.prompts import describe_tools
from lookahead_agent.agents.run_record import OF_RUN, REPEATED, ToolResult, messages_of_run, own_words, with_question
from lookahead_agent.agents.tool_results import FitContextMiddleware
from lookahead_agent.agents.tool_use import is_read_only, truncate
from lookahead_agent.agents.turns import (
    RETRIES,
    ModelCall,
    Turn,
    TurnMiddleware,
    lookahead_settings,
    plan_call,
    warm,
)
from lookahead_agent.agents.written_calls import format_call

NAMED_LENGTH = 4 * SHOWN_LENGTH  # Longest error, and longest result that a line references, in an executor's prompt
REPLAN_LENGTH = 2 * SHOWN_LENGTH  # Longest result where the planner plans again

PLAN_NOW = """Now write "Plan:" and the numbered calls, in this form and nothing else:

Plan:
{form}"""

REPLANNER = """{question}

An earlier plan did not work. These are its results, and what failed:

{results}

Write another plan for what is still missing.{numbering}"""

NUMBERING = " Number its calls from {next} on: {known} for the results above, which need no further call."

EXECUTOR = """You carry out one line of a plan by one tool call. Put in values from the question and the results."""

# The failed call and its error are last: behind long results, a small model forgets what the line is about.
RETRY_TASK = """Question: {question}

Results so far:

{results}

Line {number} of the plan: {line}

A call for this line failed: {call}

{error}

Write a call without this fault."""

EXECUTOR_TASK = """Question: {question}

Results so far:

{results}

Call now, with values in place of results: {line}"""

# The question is last: behind long results, a small model forgets a question before them.
FINISHER_TASK = """Results:

{results}

Question: {question}"""


class PlanMiddleware(TurnMiddleware):
    """Plans tool calls, has them executed, and answers from their results.

    The planner writes thoughts, which its policy may speculate on. After "Plan:" it writes one call per line, which
    only the target writes. A call runs as written once its references have results. A model writes the calls of
    incomplete lines. It also rewrites a failed call, with the error and the tool's schema in the prompt. The labels of
    the model's calls are "planner", "executor" and "finisher".

    Args:
        tools: The agent's tools.
        planner: System prompt with {tools} and {form}, which asks for "Plan:" and numbered calls.
        finisher: System prompt.
        max_plans: Maximum number of plans per question. A call that failed after its retries causes a new plan.
        ordered: Whether lines run in order unless their tools are read-only. Otherwise only tools that declare
            `metadata={"readOnlyHint": False}` keep the order, and other lines wait only for their references.

    Raises:
        ValueError: `tools` is empty, or `max_plans` is below 1.
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
        self.plan_tools = PlanTools(self.by_name)
        self._form = plan_form(tools)
        self._planner = planner.format(tools=describe_tools(tools), form=self._form)
        self._finisher = finisher
        self._max_plans, self._ordered = max_plans, ordered

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Take the next turn: plan, calls, or answer."""
        request, exact = with_run(request), exact_results(messages_of_run(request.state))
        messages: list[Any] = []
        while True:
            conversation = Conversation.read([*request.messages, *messages], self.plan_tools, exact)
            run = conversation.plans[-1] if conversation.plans else None
            ready, line = (self._ready(run), self._next_incomplete(run)) if run is not None else ([], None)
            replan = len(conversation.plans) < self._max_plans and run is not None and run.has_failed
            if run is None or (replan and not ready and line is None):
                model_request, number = self._planner_request(request, conversation), len(conversation.plans) + 1
                plan, *early = (yield ModelCall(model_request, plan=number, earlier=conversation.plans)).result
                if MARKER not in plan.text:
                    plan_now = ModelCall(
                        self._missing_plan_request(model_request, plan), plan=number, earlier=conversation.plans
                    )
                    plan, *early = _prepend_thoughts(plan, (yield plan_now).result)
                messages += [_name_reply(plan, "planner"), *early]
                exact |= exact_results(early)
                if early:  # early results: the outer middleware fits them into the context before they are read
                    return ModelResponse(result=messages)
                continue
            if ready:
                calls = [plan_call(len(conversation.plans), number, name, args) for number, name, args in ready]
                messages = _with_calls(messages, calls)
                repeated = self.find_repeated_results(conversation.plans[:-1], calls, run)
                if not repeated:
                    return ModelResponse(result=messages)
                messages += repeated
                exact |= exact_results(repeated)
                if len(repeated) < len(calls):
                    return ModelResponse(result=messages)
                continue
            if line is not None:
                reply, *_ = (yield ModelCall(self._executor_request(request, conversation, run, line))).result
                call = reply.tool_calls[0] if isinstance(reply, AIMessage) and reply.tool_calls else None
                if call is None:
                    messages.append(AIMessage(reply.text, name="executor", additional_kwargs={"line": line.number}))
                    continue
                planned = plan_call(len(conversation.plans), line.number, call["name"], call["args"])
                messages.append(_name_reply(reply, "executor", [planned]))
                earlier = [result for before, result in run.attempts.get(line.number, ()) if _is_same(before, call)]
                if earlier:
                    messages.append(_result(planned, earlier[-1].text, "error", {REPEATED: True}))
                    continue
                if repeated := self.find_repeated_results(conversation.plans[:-1], [planned], run):
                    messages += repeated
                    exact |= exact_results(repeated)
                    continue
                return ModelResponse(result=messages)
            task = HumanMessage(
                FINISHER_TASK.format(question=conversation.question, results=format_plans(conversation.plans))
            )
            model_request = _node_request(request, "finisher", self._finisher, [*conversation.before, task])
            answer, *_ = (yield ModelCall(model_request)).result
            history = [*conversation.before, HumanMessage(conversation.question), AIMessage(answer.text)]
            self.warm(request.model, history, request.system_message)
            return ModelResponse(result=[*messages, answer])

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolResult]) -> ToolResult:
        """Call the tool, and note the call that a person or middleware put in place of the plan's."""
        return _with_note(request, handler(request))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolResult]]
    ) -> ToolResult:
        """Run `wrap_tool_call` in an event loop."""
        return _with_note(request, await handler(request))

    def warm(
        self, llm: object, conversation: Sequence[BaseMessage] = (), system_message: SystemMessage | None = None
    ) -> None:
        """Have a `ChatLookahead` prefill the beginning of the next question's prompts; see `ChatLookahead.warm`.

        Args:
            llm: The agent's model; other models are ignored.
            conversation: Messages before the question.
            system_message: The agent's own.
        """
        for node, system in (("planner", self._planner), ("finisher", self._finisher)):
            warm(llm, [_system_message(system_message, system), *conversation], node=node)

    def find_repeated_results(
        self, earlier: Sequence[PlanRun], calls: Sequence[ToolCall], now: PlanRun | None = None
    ) -> list[BaseMessage]:
        """Return results of calls that earlier plans of the question made, so that they are not made again.

        A call of a tool that only reads is made again if another tool may have changed what it reads.
        """
        made = [entry for run in earlier for attempts in run.attempts.values() for entry in attempts]
        since = [entry for attempts in now.attempts.values() for entry in attempts] if now is not None else []
        has_written = not all(self._only_reads(call) for call, _ in (*made, *since))
        results: list[BaseMessage] = []
        for call in calls:
            same = [result for other, result in made if _is_same(other, call)]
            if same and not (has_written and self._only_reads(call)):
                results.append(_result(call, same[-1].text, same[-1].status, {}))
        return results

    def _only_reads(self, call: ToolCall) -> bool:
        return (tool := self.by_name.get(call["name"])) is not None and is_read_only(tool)

    def _waits(self, line: PlanLine, run: PlanRun) -> bool:
        """Whether a line lacks a result that it references, or must not run before an earlier line."""
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
        """Return number, tool and arguments of the calls that can run as written, in parallel."""
        ready = []
        for line in run.lines:
            if line.tool is None or run.tries(line) or self._waits(line, run):
                continue
            if (arguments := line.fill(run.results)) is not None:
                ready.append((line.number, line.tool, arguments))
                if self._keep_order(line, line):
                    break
        # The tool node ends the run with the result of a `return_direct` tool only if no other tool is called with it.
        others = [call for call in ready if not self.by_name[call[1]].return_direct]
        return others or ready

    def _next_incomplete(self, run: PlanRun) -> PlanLine | None:
        """Return the first line whose call a model has to write: the line is incomplete, or its call has failed."""
        missing = (line for line in run.lines if line.number not in run.results and run.tries(line) <= RETRIES)
        return next((line for line in missing if not self._waits(line, run)), None)

    def _planner_request(self, request: ModelRequest[Any], conversation: Conversation) -> ModelRequest[Any]:
        task = conversation.question
        if conversation.plans:
            count = len(results_of(conversation.plans))
            known = "$1 stands" if count == 1 else f"$1 to ${count} stand"
            numbering = NUMBERING.format(next=count + 1, known=known) if count else ""
            shown = format_plans(conversation.plans, REPLAN_LENGTH)
            task = REPLANNER.format(question=task, results=shown, numbering=numbering)
        return _node_request(request, "planner", self._planner, [*conversation.before, HumanMessage(task)], (MARKER,))

    def _missing_plan_request(self, request: ModelRequest[Any], thoughts: BaseMessage) -> ModelRequest[Any]:
        """Ask for the plan that a model left out after its thoughts."""
        task = HumanMessage(PLAN_NOW.format(form=self._form))
        settings = dict(request.model_settings)
        if lookahead_settings(request.model, node="planner"):
            settings["policy"] = "off"  # the whole reply is a plan, even if the model leaves out "Plan:" again
        return request.override(messages=[*request.messages, AIMessage(thoughts.text), task], model_settings=settings)

    def _executor_request(
        self, request: ModelRequest[Any], conversation: Conversation, run: PlanRun, line: PlanLine
    ) -> ModelRequest[Any]:
        attempts = run.attempts.get(line.number, ())
        shown = run.format_results(line, SHOWN_LENGTH, SHOWN_LENGTH if attempts else NAMED_LENGTH)
        # A plan that is not numbered after earlier results references none of them, but a call may need them.
        earlier = [] if run.known else conversation.plans[:-1]
        before = format_plans(earlier, SHOWN_LENGTH, without=run.words(line)) if earlier else ""
        parts = {"question": conversation.question, "line": line.without_references(run.results)}
        results = "\n\n".join(filter(None, [before.removesuffix("none"), shown])) or "none"
        if attempts:
            failed, result = attempts[-1]
            words, explanation = own_words(result.text)
            error = shorten(words, NAMED_LENGTH) + explanation
            call = format_call(failed["name"], failed["args"])
            task = RETRY_TASK.format(**parts, results=results, number=line.number, call=call, error=error)
        else:
            task = EXECUTOR_TASK.format(**parts, results=results)
        tools: list[BaseTool | dict[str, Any]] = [*self.by_name.values()]
        if line.tool is not None and run.tries(line) < 2:
            tools = [self.by_name[line.tool]]
        call_request = _node_request(request, "executor", EXECUTOR, [HumanMessage(task)])
        return call_request.override(tools=tools, tool_choice="any")


def with_run(request: ModelRequest[Any]) -> ModelRequest[Any]:
    """Put the messages of the run back that middleware removed from a request, and shorten what is then too long.

    Results stay as middleware edited them for the prompt. Plans stay as they were written.
    """
    run = messages_of_run(request.state)
    request = with_question(request)
    current = {message.id: message for message in request.messages}
    marked = (message for message in request.messages if OF_RUN in message.additional_kwargs)
    question = next(marked, current.get(run[0].id, run[0]))
    ids = {message.id for message in run}
    others = [message for message in request.messages if message.id not in ids and message is not question]
    results = {message.id: current.get(message.id, message) for message in run if isinstance(message, ToolMessage)}
    if not results.keys() <= current.keys():
        fitted: list[AnyMessage] = [*others, question, *(results.get(message.id, message) for message in run[1:])]
        FitContextMiddleware(request.model).apply(fitted, count_tokens=count_tokens_approximately)
        results |= {message.id: message for message in fitted if message.id in results}
    return request.override(messages=[*others, question, *(results.get(message.id, message) for message in run[1:])])


def _is_same(call: ToolCall, other: ToolCall) -> bool:
    return (call["name"], call["args"]) == (other["name"], other["args"])


def _with_note(request: ToolCallRequest, result: ToolResult) -> ToolResult:
    """Note the executed call and its own result if it is not the one of the model's message.

    LangChain then tells the model so in the text of the result, which is not part of the result's value.
    """
    call = request.tool_call
    replies = [message for message in messages_of_run(request.state) if isinstance(message, AIMessage)]
    planned = [entry for reply in replies for entry in reply.tool_calls if entry["id"] == call["id"]]
    is_planned = any((entry["name"], entry["args"]) == (call["name"], call["args"]) for entry in planned)
    if not isinstance(result, ToolMessage) or is_planned or not planned:
        return result
    executed = {
        "name": call["name"],
        "args": call["args"],
        "text": truncate(result.text, "ask the tool for less at once"),
    }
    return result.model_copy(update={"additional_kwargs": {**result.additional_kwargs, EXECUTED: executed}})


def _result(call: ToolCall, text: str, status: str, note: dict[str, Any]) -> ToolMessage:
    fields: dict[str, Any] = {"status": status, "additional_kwargs": note}
    return ToolMessage(text, tool_call_id=call["id"] or "", name=call["name"], **fields)


def _node_request(
    request: ModelRequest[Any], node: str, system: str, messages: list[AnyMessage], markers: Sequence[str] = ()
) -> ModelRequest[Any]:
    """Return a request without tools, with a node's system text after the agent's own."""
    settings = request.model_settings | lookahead_settings(request.model, node=node, action_markers=markers)
    system_message = _system_message(request.system_message, system)
    node_request = request.override(system_message=system_message, messages=messages, model_settings=settings)
    return node_request.override(tools=[], tool_choice=None)


def _system_message(own: SystemMessage | None, system: str) -> SystemMessage:
    """Append a node's system text to the agent's own."""
    return SystemMessage(f"{own.text}\n\n{system}" if own is not None else system)


def _name_reply(reply: BaseMessage, name: str, calls: list[ToolCall] | None = None) -> AIMessage:
    changed: dict[str, Any] = {"name": name} | ({"tool_calls": calls} if calls is not None else {})
    assert isinstance(reply, AIMessage)
    return reply.model_copy(update=changed)


def _prepend_thoughts(thoughts: BaseMessage, replies: list[BaseMessage]) -> list[BaseMessage]:
    """Prepend the thoughts and the marker to the first reply."""
    plan, *more = replies
    intro, _, lines = plan.text.strip().rpartition(MARKER)
    text = "\n\n".join(filter(None, [thoughts.text.strip(), intro.strip(), f"{MARKER}\n{lines.strip()}"]))
    return [plan.model_copy(update={"content": text}), *more]


def _with_calls(messages: list[BaseMessage], calls: list[ToolCall]) -> list[BaseMessage]:
    """Add the calls to the turn's messages: to the planner's message, if that is the last one."""
    if messages and isinstance(last := messages[-1], AIMessage) and last.name == "planner":
        return [*messages[:-1], _name_reply(last, "planner", calls)]
    return [*messages, AIMessage("", tool_calls=calls, name="executor")]
