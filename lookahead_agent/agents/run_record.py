"""The messages of an agent's run: how to read and to show them, and their record, which no middleware changes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import takewhile
from typing import Annotated, Any, TypeVar

from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    ModelRequest,
    ToolCallRequest,
    hook_config,
)
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ChatMessage, HumanMessage, ToolMessage
from langchain_core.tools import ToolException
from langgraph.types import Command

from lookahead_agent.agents.tool_use import contain_tool, foreign_code
from lookahead_agent.agents.written_calls import Parameters, format_call
from lookahead_agent.errors import ConfigurationError, ForeignCodeError
from lookahead_agent.system.background import contain

MessageT = TypeVar("MessageT", bound=BaseMessage)
ToolResult = ToolMessage | Command[Any]

DIRECT = "direct"
"""Artifact of a result by an agent behind a tool, whose run ended with the result of a tool with `return_direct`."""

REPEATED = "repeated"
"""Key in `additional_kwargs` of a `ToolMessage` whose call was skipped as a repetition."""

PLAN_NODES = ("planner", "executor")
"""Names of the model's messages in a plan, beside the answer."""

TOOL_HEADING = "\n\nThe tool is:\n"
"""Ends a tool's own words about a failure; the explanation of `ToolResultMiddleware` follows."""

OF_RUN = "question_of_run"
"""Key in `additional_kwargs` of the question that a run is about, in the messages of a model's turn."""


def is_question(message: BaseMessage) -> bool:
    """Whether a person's message is a question, and not the summary of earlier messages by a middleware."""
    is_human = isinstance(message, HumanMessage) or (
        isinstance(message, ChatMessage) and message.role.lower() in ("user", "human")
    )
    return is_human and message.additional_kwargs.get("lc_source") != "summarization"


def since_last_question(messages: Sequence[MessageT]) -> Sequence[MessageT]:
    """Return the messages from the last question on, or from the one that a run is about.

    Raises:
        ConfigurationError: There is no question, or it has no text.
    """
    questions = [at for at, message in enumerate(messages) if is_question(message)]
    of_run = [at for at in questions if OF_RUN in messages[at].additional_kwargs]
    if not questions or not messages[at := (of_run or questions)[-1]].text.strip():
        raise ConfigurationError(
            f"{'the question is empty' if questions else 'there is no question'}: "
            'the last human message has to have a text, as in {"messages": [("human", "What is tea?")]}'
        )
    return messages[at:]


def result_blocks(messages: Iterable[AnyMessage], *, explained: bool = False) -> str:
    """Format calls and results as blocks, `[1] name(argument="value")` and the text, each once; "none" without any.

    Calls that failed with the same words of their tool share a block. With `explained`, the tool's arguments follow
    the last result if that call failed.
    """
    calls: dict[str | None, str] = {}
    blocks: dict[tuple[str, str], list[str]] = {}  # headings by call and text, or by the words about a failure
    explanation = ""
    for message in messages:
        if isinstance(message, AIMessage):
            calls |= {call["id"]: format_call(call["name"], call["args"]) for call in message.tool_calls}
        elif isinstance(message, ToolMessage) and REPEATED not in message.additional_kwargs:
            called, failed = calls.get(message.tool_call_id, message.name or "a call"), message.status == "error"
            text, explanation = own_words(message.text) if failed else (message.text, "")
            key = ("" if failed else called, text.strip() or "(nothing)")
            headings = blocks.pop(key, [])
            blocks[key] = list(dict.fromkeys([*headings, f"{called} failed" if failed else called]))
    listed = [
        "\n".join([f"[{number}] {heading}", *more, text])
        for number, ((_, text), (heading, *more)) in enumerate(blocks.items(), 1)
    ]
    return "\n\n".join(listed) + (explanation if explained else "") or "none"


def own_words(error: str) -> tuple[str, str]:
    """Split the text of a failed call into the tool's own words and the explanation after `TOOL_HEADING`."""
    words, heading, explanation = error.partition(TOOL_HEADING)
    return words, heading + explanation


def conversation_with_results(
    messages: Sequence[AnyMessage], heading: str, then: str = "", *, explained: bool = False
) -> list[AnyMessage]:
    """Return the conversation without calls: earlier questions and answers, and the last question with its results.

    `heading` precedes the results, which follow the question as blocks, and `then` follows them; `explained` is as in
    `result_blocks`.
    """
    now = since_last_question(messages)
    question = [message.text for message in now if is_question(message)]
    parts = [*question, f"{heading}:\n\n{result_blocks(now, explained=explained)}", then]
    before = conversation_before(messages[: len(messages) - len(now)])
    return [*before, HumanMessage("\n\n".join(filter(None, parts)))]


def conversation_before(messages: Sequence[AnyMessage]) -> list[AnyMessage]:
    """Return the questions and answers in messages, without calls; a result that ended a run is an answer."""
    before: list[AnyMessage] = []
    for number, message in enumerate(messages, 1):
        if isinstance(message, ToolMessage):
            if all(map(is_question, messages[number : number + 1])):
                before.append(AIMessage(message.text))
        elif not isinstance(message, AIMessage) or not (
            message.tool_calls or message.invalid_tool_calls or message.name in PLAN_NODES
        ):
            before.append(message)
    return [message for message in before if message.text.strip()]


class RunState(AgentState[Any], total=False):
    """The state of an agent, with the record of its run."""

    run_record: Annotated[dict[str, Any], PrivateStateAttr]


class RunRecordMiddleware(AgentMiddleware[Any, Any, Any]):
    """Records a run in the graph's state: its question, its calls and results, and the number of its turns.

    Middleware may summarise, trim or remove the messages of a run: limits, plans and the question do not depend on
    them.
    """

    state_schema = RunState

    def before_agent(self, state: AgentState[Any], runtime: Any) -> dict[str, Any]:
        """Begin the record of a run.

        Raises:
            ConfigurationError: There is no question, or it has no text.
        """
        messages = state.get("messages") or []
        now = since_last_question(messages)
        earlier = [message.id for message in messages[: len(messages) - len(now)]]
        return {"run_record": {"earlier": earlier, "messages": [*now], "turns": 0}}

    @hook_config(can_jump_to=["end"])
    def before_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """Record what the last turn added, before other middleware removes it; end the run after a `DIRECT` result."""
        if (record := _record(state)) is None:
            return None
        messages = messages_of_run(state)
        update = {"run_record": record | {"messages": messages, "turns": record["turns"] + 1}}
        results = [*takewhile(lambda message: isinstance(message, ToolMessage), reversed(messages))]
        is_direct = bool(results) and all(getattr(result, "artifact", None) == DIRECT for result in results)
        return update | ({"jump_to": "end"} if is_direct else {})


class ContainedToolMiddleware(AgentMiddleware[Any, Any, Any]):
    """Calls tools so that their code can neither end the program nor block an event loop; see `contain_tool`.

    Arguments that a JSON schema refuses are an error for the model: LangChain checks those of Pydantic's classes only.
    """

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolResult]) -> ToolResult:
        """Call the tool."""
        return handler(_contain(request, asynchronous=False))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolResult]]
    ) -> ToolResult:
        """Run `wrap_tool_call` in an event loop."""
        return await handler(_contain(request, asynchronous=True))


def _contain(request: ToolCallRequest, *, asynchronous: bool) -> ToolCallRequest:
    if request.tool is None:
        return request
    if isinstance(request.tool.args_schema, dict):
        try:
            Parameters.of(request.tool).check(request.tool_call["args"])
        except ValueError as error:
            raise ToolException(str(error)) from error
    return request.override(tool=contain_tool(request.tool, asynchronous=asynchronous))


_HOOKS = ("before_agent", "before_model", "after_model", "after_agent", "wrap_model_call", "wrap_tool_call")


def contain_middleware(entry: AgentMiddleware[Any, Any, Any]) -> None:
    """Let the hooks of a user's middleware raise ForeignCodeError in place of exceptions that would end the program."""
    for name, wrap in ((f"{kind}{hook}", wrap) for hook in _HOOKS for kind, wrap in _KINDS.items()):
        hook = getattr(entry, name)
        if getattr(type(entry), name) is not getattr(AgentMiddleware, name) and not hasattr(hook, "__wrapped__"):
            # Past the checks of frozen dataclasses; LangChain reads the hooks from the object.
            object.__setattr__(entry, name, wrap(hook))


def _contain_sync(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with foreign_code():
                return hook(*args, **kwargs)
        except KeyboardInterrupt as error:
            # Ctrl-C, unless an event loop runs here, which the exception would end.
            if threading.current_thread() is threading.main_thread() and asyncio._get_running_loop() is None:
                raise
            raise ForeignCodeError("it raised KeyboardInterrupt") from error

    return run


def _contain_async(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await contain(hook(*args, **kwargs))

    return run


_KINDS = {"": _contain_sync, "a": _contain_async}
"""How hooks are wrapped, by the beginning of their names."""


def _record(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of the run; None: the agent has no `RunRecordMiddleware`."""
    record: dict[str, Any] | None = state.get("run_record")
    return record


def messages_of_run(state: Mapping[str, Any]) -> list[AnyMessage]:
    """Return a run's question with its replies and results, each in its current version or as it was when removed."""
    messages: list[AnyMessage] = state["messages"]
    if (record := _record(state)) is None:
        return [*since_last_question(messages)]
    current = {message.id: message for message in messages}
    question, *others = record["messages"]
    # A reminder that middleware adds for the model counts as long as it is there.
    known = [question, *(message for message in others if message.id in current or not is_question(message))]
    run = [current.get(message.id, message) for message in known]
    removed = [(message.type, message.content) for message in known if message.id not in current]
    calls = {identifier for message in run for identifier in _call_ids(message)}
    answered = {message.tool_call_id for message in run if isinstance(message, ToolMessage)}
    for message in messages:
        if message.id in {*record["earlier"], *(before.id for before in run)}:
            continue
        # Middleware that rebuilds the messages makes copies without the ids.
        is_copy = not _call_ids(message) and (message.type, message.content) in removed
        if isinstance(message, AIMessage):
            is_new = not (is_copy or (_call_ids(message) and _call_ids(message) <= calls))
        elif isinstance(message, ToolMessage):
            is_new = message.tool_call_id in calls - answered
        else:
            is_new = is_question(message) and not is_copy
        if is_new:
            run.append(message)
            calls |= _call_ids(message)
            answered |= {message.tool_call_id} if isinstance(message, ToolMessage) else set()
    return run


def _call_ids(message: AnyMessage) -> set[str | None]:
    """Return the ids of the calls of a reply."""
    if not isinstance(message, AIMessage):
        return set()
    return {call["id"] for call in (*message.tool_calls, *message.invalid_tool_calls)}


def turn_number(state: Mapping[str, Any]) -> int | None:
    """Return the number of the current turn in its run, from 1; None: the agent has no `RunRecordMiddleware`."""
    record = _record(state)
    return record["turns"] if record is not None else None


def with_question(request: ModelRequest[Any]) -> ModelRequest[Any]:
    """Mark the question of the run in a request's messages, and put it back if middleware removed it."""
    if (record := _record(request.state)) is None:
        return request
    question, messages = record["messages"][0], [*request.messages]
    places = [at for at, message in enumerate(messages) if message.id == question.id]
    # Middleware that rebuilds the messages makes copies without the ids.
    places += [
        at
        for at, message in enumerate(messages)
        if message.id not in record["earlier"] and is_question(message) and message.content == question.content
    ]
    if places:
        question = messages.pop(at := places[0])
    else:
        ids = {message.id for message in messages_of_run(request.state)}
        at = next((at for at, message in enumerate(messages) if message.id in ids), len(messages))
    marked = question.model_copy(update={"additional_kwargs": {**question.additional_kwargs, OF_RUN: True}})
    return request.override(messages=[*messages[:at], marked, *messages[at:]])
