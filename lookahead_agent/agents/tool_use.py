"""Tools that fail in words a model can use: how they are made, how graphs call them, and ask before they do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, NamedTuple, ParamSpec, cast
from uuid import uuid4

from langchain_core.messages import ToolCall, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, ToolException, tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import GraphBubbleUp
from langgraph.types import interrupt
from pydantic import ValidationError

from lookahead_agent.engines import background
from lookahead_agent.errors import LookaheadError, validation_message

logger = logging.getLogger(__name__)

LONGEST_RESULT = 50_000
"""Characters of a tool's result, and of its errors, that reach a model: the line that says what is cut included."""

_IN_WORDS = (ToolException, ValueError, LookaheadError)
"""Errors that a tool raises on purpose, whose message says all."""

Given = ParamSpec("Given")


class ToolOutcome(NamedTuple):
    """The outcome of a call.

    Attributes:
        output: What the tool returned, or what went wrong.
        failed: Whether something did.
    """

    output: str
    failed: bool


def cut(text: str, rest: str, most: int = LONGEST_RESULT) -> str:
    """The beginning of a text that is too long for a model, with a last line that says how much is left out.

    Args:
        text: The text. Lone surrogates, which no message can carry, become "?".
        rest: How the model gets the rest, such as "ask for fewer rows".
        most: Characters that are shown; with the last line there are never more than `LONGEST_RESULT`.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= min(most, LONGEST_RESULT):
        return text
    room = LONGEST_RESULT - len(_cut_line(len(text), len(text), rest))
    shown = max(0, min(most, room))
    return text[:shown] + _cut_line(shown, len(text), rest)


def _cut_line(shown: int, length: int, rest: str) -> str:
    return f"\n… (cut: {shown:,} of {length:,} characters; {rest})"


def error_text(error: BaseException) -> str:
    """An error in words that a model can use; at most `LONGEST_RESULT` characters, whatever the error says."""
    try:
        said = validation_message(error) if isinstance(error, ValidationError) else str(error)
    except Exception:  # an error that cannot be printed is still one
        said = ""
    if isinstance(error, ValidationError):
        said = f"wrong arguments: {said}"
    elif not said or not isinstance(error, _IN_WORDS):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return cut(said, "the rest of this error is of no use")


def make_tool(
    *, rest: str, description: str | None = None, read_only: bool | None = None
) -> Callable[[Callable[Given, str] | Callable[Given, Awaitable[str]]], BaseTool]:
    """A decorator like LangChain's `tool`, for tools that never raise and never return too much.

    Errors, wrong arguments included, are results of the status "error". `KeyboardInterrupt` and its like pass, and so
    do LangGraph's own signals.

    Args:
        rest: How a model gets what is left out of a long result.
        description: For the model; None: the function's docstring.
        read_only: Whether calls change nothing, so that they may be made in any order and at once; kept as MCP's
            `readOnlyHint` in the tool's metadata. None: nothing is said.
    """

    def decorated(function: Callable[Given, str] | Callable[Given, Awaitable[str]]) -> BaseTool:
        @wraps(function)
        def bounded(*args: Given.args, **kwargs: Given.kwargs) -> str:
            with _documented():
                return cut(cast("str", function(*args, **kwargs)), rest)

        @wraps(function)
        async def abounded(*args: Given.args, **kwargs: Given.kwargs) -> str:
            with _documented():
                return cut(await cast("Awaitable[str]", function(*args, **kwargs)), rest)

        made = tool(description=description)(abounded if iscoroutinefunction(function) else bounded)
        made.handle_tool_error = True
        made.handle_validation_error = error_text
        if read_only is not None:
            made.metadata = {"readOnlyHint": read_only}
        return made

    return decorated


def in_both_worlds(made: BaseTool) -> BaseTool:
    """The tool, or one that also works in `invoke` where it is only a coroutine.

    The coroutine runs in the library's own event loop, always the same, so that it may keep connections between calls.
    """
    if not isinstance(made, StructuredTool) or made.func is not None or made.coroutine is None:
        return made
    coroutine = cast("Callable[..., Coroutine[Any, Any, Any]]", made.coroutine)

    # With its signature, by which LangChain decides what else it is given.
    @wraps(coroutine)
    def waited(*args: Any, **kwargs: Any) -> Any:
        return background.run(coroutine(*args, **kwargs))

    return made.model_copy(update={"func": waited})


@contextmanager
def _documented() -> Iterator[None]:
    """Every error becomes the one that a tool may raise."""
    try:
        yield
    except GraphBubbleUp:
        raise
    except Exception as error:
        raise ToolException(error_text(error)) from error


def use_tool(tools: Mapping[str, BaseTool], call: ToolCall, *, raised: tuple[type[Exception], ...] = ()) -> ToolOutcome:
    """Call a tool by its name; whatever it raises is an outcome that failed.

    A call that loses its connection is made once more. LangGraph's own signals, such as `interrupt`, pass.

    Args:
        tools: Tools by name.
        call: The tool's name and its arguments.
        raised: Errors that are raised all the same.
    """
    if call["name"] not in tools:
        return _no_tool(tools, call["name"])
    passing: tuple[type[Exception], ...] = (GraphBubbleUp, *raised)
    for last in (False, True):
        try:
            return _outcome(tools[call["name"]].invoke(_request(call)))
        except passing:
            raise
        except Exception as error:
            if last or not isinstance(error, ConnectionError):
                return _failed(call["name"], error)
    raise AssertionError("the last try returns")


async def ause_tool(tools: Mapping[str, BaseTool], call: ToolCall) -> ToolOutcome:
    """`use_tool`, awaited: a tool that is a coroutine can be cancelled, another runs in a thread."""
    if call["name"] not in tools:
        return _no_tool(tools, call["name"])
    for last in (False, True):
        try:
            return _outcome(await tools[call["name"]].ainvoke(_request(call)))
        except GraphBubbleUp:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return _failed(call["name"], error)  # the tool cancelled a scope of its own, and nobody the call
        except Exception as error:
            if last or not isinstance(error, ConnectionError):
                return _failed(call["name"], error)
    raise AssertionError("the last try returns")


def _request(call: ToolCall) -> ToolCall:
    # Without an identity LangChain returns bare content, which does not say whether the call failed.
    return ToolCall(name=call["name"], args=dict(call["args"]), id=call["id"] or uuid4().hex, type="tool_call")


def _outcome(returned: Any) -> ToolOutcome:
    if not isinstance(returned, ToolMessage):
        return ToolOutcome(f"the tool returned a {type(returned).__name__}, which this graph cannot use", failed=True)
    # As in `cut`: a result that no message can carry would end the run where it is saved.
    return ToolOutcome(returned.text.encode(errors="replace").decode(), returned.status == "error")


def _failed(name: str, error: BaseException) -> ToolOutcome:
    if not isinstance(error, _IN_WORDS):
        logger.warning("the tool %s failed: %s", name, type(error).__name__, exc_info=error)
    return ToolOutcome(error_text(error), failed=True)


def _no_tool(tools: Mapping[str, BaseTool], name: str) -> ToolOutcome:
    return ToolOutcome(cut(f"there is no tool {name}; there are {', '.join(tools)}", "name one of them"), failed=True)


def check_ask_before(
    ask_before: Collection[str], tools: Mapping[str, BaseTool], checkpointer: BaseCheckpointSaver[str] | None
) -> None:
    """Check that a graph can ask before calls of some tools.

    Args:
        ask_before: Their names.
        tools: The tools that there are, by name.
        checkpointer: Where a run that waits is kept.

    Raises:
        ValueError: It names none of the tools, or there is no checkpointer.
    """
    if unknown := sorted(set(ask_before) - tools.keys()):
        raise ValueError(f"ask_before names tools that there are not: {', '.join(unknown)}")
    if ask_before and checkpointer is None:
        raise ValueError("ask_before needs a checkpointer: a run that waits is kept there")


def ask_or_call(call: ToolCall, ask_before: Collection[str]) -> ToolCall | ToolOutcome:
    """Stop the graph and ask, if the call's tool is one of those; it goes on with `Command(resume=…)`.

    Returns:
        The call if it is to be made (`resume=True`), else an outcome that says why not.
    """
    if call["name"] not in ask_before:
        return call
    decision = interrupt({"tool": call["name"], "arguments": call["args"], "question": "May this call be made?"})
    if decision is True:
        return call
    reason = decision if isinstance(decision, str) and decision else "the user does not want this call"
    return ToolOutcome(f"not carried out: {reason}", failed=True)
