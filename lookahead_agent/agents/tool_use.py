"""Tools that fail in words a model can use: how they are made, and called with and without an event loop."""

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

LONGEST_RESULT = 50_000
"""Characters of a tool's result, and of its errors, that reach a model: the line that says what is cut included."""

_IN_WORDS = (ToolException, ValueError, LookaheadError)  # Errors that a tool raises on purpose, whose message says all

Given = ParamSpec("Given")


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
    room = LONGEST_RESULT - len(cut_line(len(text), len(text), rest))
    shown = max(0, min(most, room))
    return text[:shown] + cut_line(shown, len(text), rest)


def cut_line(shown: int, length: int, rest: str) -> str:
    """The last line of a text that was cut; `rest` says how the model gets the rest."""
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
    """The tool, or one that also works in `invoke` where it is only a coroutine."""
    # It runs in the library's own event loop, always the same, so that it may keep connections between calls.
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
