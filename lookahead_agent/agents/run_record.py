"""The record of an agent's run, on which its limits and plans rest, and which no middleware changes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from itertools import takewhile
from typing import Annotated, Any

from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    ModelRequest,
    ToolCallRequest,
    hook_config,
)
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
from langchain_core.tools import ToolException
from langgraph.types import Command

from lookahead_agent.agents.prompts import OF_RUN, is_question, since_last_question
from lookahead_agent.agents.tool_use import contain_tool, foreign_code
from lookahead_agent.agents.written_calls import Parameters
from lookahead_agent.errors import ForeignCodeError
from lookahead_agent.system.background import contain

ToolResult = ToolMessage | Command[Any]

DIRECT = "direct"
"""Artifact of a result by an agent behind a tool, whose run ended with the result of a tool with `return_direct`."""


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
