"""Tools whose errors a model can use: their creation, and calls with and without an event loop."""

from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, cast

from langchain_core.tools import BaseTool, StructuredTool, ToolException, tool
from langgraph.errors import GraphBubbleUp
from pydantic import ValidationError

from lookahead_agent.engines import background
from lookahead_agent.errors import LookaheadError, validation_message

MAX_RESULT_LENGTH = 50_000
"""Maximum length of a tool's result or error for a model, truncation notice included."""

_EXPECTED_ERRORS = (ToolException, ValueError, LookaheadError)  # Errors that a tool raises on purpose, to be read

Given = ParamSpec("Given")


def cut(text: str, rest: str, most: int = MAX_RESULT_LENGTH) -> str:
    """Truncate a text that is too long for a model; the last line says how much is left out.

    Args:
        text: The text. Lone surrogates, which no message can carry, become "?".
        rest: How the model gets the rest, such as "ask for fewer rows".
        most: Maximum number of characters shown; with the last line there are at most `MAX_RESULT_LENGTH`.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= min(most, MAX_RESULT_LENGTH):
        return text
    available = MAX_RESULT_LENGTH - len(truncation_notice(len(text), len(text), rest))
    shown = max(0, min(most, available))
    return text[:shown] + truncation_notice(shown, len(text), rest)


def truncation_notice(shown: int, length: int, rest: str) -> str:
    """Return the last line of a truncated text; `rest` says how the model gets the rest."""
    return f"\n… (cut: {shown:,} of {length:,} characters; {rest})"


def error_text(error: BaseException) -> str:
    """Describe an error so that a model can use it, in at most `MAX_RESULT_LENGTH` characters."""
    try:
        message = validation_message(error) if isinstance(error, ValidationError) else str(error)
    except Exception:  # `str` of an error may fail itself
        message = ""
    if isinstance(error, ValidationError):
        message = f"wrong arguments: {message}"
    elif not message or not isinstance(error, _EXPECTED_ERRORS):
        message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return cut(message, "the rest of this error is of no use")


def make_tool(
    *, rest: str, description: str | None = None, read_only: bool | None = None
) -> Callable[[Callable[Given, str] | Callable[Given, Awaitable[str]]], BaseTool]:
    """Return a decorator like LangChain's `tool`, for tools that never raise and never return too much.

    Errors, including invalid arguments, become results of the status "error". `KeyboardInterrupt` and similar
    exceptions pass, and so do LangGraph's own signals.

    Args:
        rest: How a model gets the rest of a truncated result.
        description: For the model; None: the function's docstring.
        read_only: Whether calls change nothing, so that they may run in any order and concurrently. The tool's metadata
            keep it as MCP's `readOnlyHint`. None: unknown.
    """

    def decorate(function: Callable[Given, str] | Callable[Given, Awaitable[str]]) -> BaseTool:
        @wraps(function)
        def bounded(*args: Given.args, **kwargs: Given.kwargs) -> str:
            with _as_tool_exception():
                return cut(cast("str", function(*args, **kwargs)), rest)

        @wraps(function)
        async def abounded(*args: Given.args, **kwargs: Given.kwargs) -> str:
            with _as_tool_exception():
                return cut(await cast("Awaitable[str]", function(*args, **kwargs)), rest)

        created = tool(description=description)(abounded if iscoroutinefunction(function) else bounded)
        created.handle_tool_error = True
        created.handle_validation_error = error_text
        if read_only is not None:
            created.metadata = {"readOnlyHint": read_only}
        return created

    return decorate


def with_sync_call(original: BaseTool) -> BaseTool:
    """Return the tool; one that has a coroutine only also gets a function for `invoke`."""
    # It always runs in the library's own event loop, so that it may keep connections between calls.
    if not isinstance(original, StructuredTool) or original.func is not None or original.coroutine is None:
        return original
    coroutine = cast("Callable[..., Coroutine[Any, Any, Any]]", original.coroutine)

    # `wraps` keeps the signature, by which LangChain injects further arguments.
    @wraps(coroutine)
    def run_sync(*args: Any, **kwargs: Any) -> Any:
        return background.run(coroutine(*args, **kwargs))

    return original.model_copy(update={"func": run_sync})


@contextmanager
def _as_tool_exception() -> Iterator[None]:
    """Convert each error to a `ToolException`."""
    try:
        yield
    except GraphBubbleUp:
        raise
    except Exception as error:
        raise ToolException(error_text(error)) from error
