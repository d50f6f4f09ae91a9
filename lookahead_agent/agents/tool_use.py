"""Tools whose errors a model can use: their creation, and calls with and without an event loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial, wraps
from inspect import iscoroutinefunction, signature
from traceback import walk_tb
from typing import Any, ParamSpec, cast
from weakref import finalize

from langchain_core.callbacks import AsyncCallbackManagerForToolRun
from langchain_core.tools import BaseTool, StructuredTool, Tool, ToolException, tool
from langgraph.errors import GraphBubbleUp
from pydantic import ValidationError

from lookahead_agent.engines.foreign_loop import ForeignLoop
from lookahead_agent.errors import ForeignCodeError, LookaheadError, validation_message
from lookahead_agent.system import background
from lookahead_agent.system.texts import MAX_RESULT_LENGTH as MAX_RESULT_LENGTH
from lookahead_agent.system.texts import truncate as truncate

_EXPECTED_ERRORS = (ToolException, ValueError, LookaheadError)  # Errors that a tool raises on purpose, to be read

Given = ParamSpec("Given")


def error_text(error: BaseException) -> str:
    """Describe an error so that a model can use it, in at most `MAX_RESULT_LENGTH` characters."""
    if isinstance(error, ForeignCodeError) and error.__cause__ is not None:
        error = error.__cause__
    try:
        message = validation_message(error) if isinstance(error, ValidationError) else str(error)
    except Exception:  # `str` of an error may fail itself
        message = ""
    if isinstance(error, ValidationError):
        message = f"wrong arguments: {message}"
    elif not message or not isinstance(error, _EXPECTED_ERRORS):
        message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return truncate(message, "the rest of this error is omitted")


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
        def run_bounded(*args: Given.args, **kwargs: Given.kwargs) -> str:
            with _as_tool_exception():
                return truncate(cast("str", function(*args, **kwargs)), rest)

        @wraps(function)
        async def arun_bounded(*args: Given.args, **kwargs: Given.kwargs) -> str:
            with _as_tool_exception():
                return truncate(await cast("Awaitable[str]", function(*args, **kwargs)), rest)

        created = tool(description=description)(arun_bounded if iscoroutinefunction(function) else run_bounded)
        created.handle_tool_error = True
        created.handle_validation_error = error_text
        if read_only is not None:
            created.metadata = {"readOnlyHint": read_only}
        return created

    return decorate


def is_read_only(tool: BaseTool) -> bool:
    """Whether a tool says that its calls change nothing (`readOnlyHint`), so that they may run early or again."""
    return (tool.metadata or {}).get("readOnlyHint") is True


_loops: dict[int, ForeignLoop] = {}
"""The event loops of coroutines that are called without one, by the `id` of their tool or function."""
_loops_lock = threading.Lock()


def _loop_of(owner: object, name: str) -> ForeignLoop:
    with _loops_lock:
        if (loop := _loops.get(id(owner))) is None:
            loop = _loops[id(owner)] = ForeignLoop(f"lookahead-agent-tool-{name}")
            finalize(owner, _retire_loop, id(owner)).atexit = False
        return loop


def _retire_loop(owner_id: int) -> None:
    _loops.pop(owner_id).retire()


def with_sync_call(original: BaseTool) -> BaseTool:
    """Return the tool; one that has a coroutine only also gets a function for `invoke`."""
    # It always runs in the tool's own event loop: it may keep connections between calls, ask models, and block.
    if not isinstance(original, (StructuredTool, Tool)):
        return _with_sync_run(original)
    if original.func is not None or original.coroutine is None:
        return original
    coroutine = cast("Callable[..., Coroutine[Any, Any, Any]]", original.coroutine)

    # `wraps` keeps the signature, by which LangChain injects further arguments.
    @wraps(coroutine)
    def run_sync(*args: Any, **kwargs: Any) -> Any:
        return _loop_of(coroutine, original.name).run(lambda: coroutine(*args, **kwargs))

    return original.model_copy(update={"func": run_sync})


def _with_sync_run(original: BaseTool) -> BaseTool:
    """Return a tool of a user's class; one whose `_run` is not implemented runs its `_arun` in an event loop."""
    if type(original)._arun is BaseTool._arun or "_run" in vars(original):
        return original

    @wraps(original._run)
    def run_sync(*args: Any, **kwargs: Any) -> Any:
        try:
            return original._run(*args, **kwargs)
        except NotImplementedError as error:
            frames = [*walk_tb(error.__traceback__)]
            if len(frames) > _FRAMES_OF_RUN:  # something that `_run` calls raised it, perhaps after an effect
                raise
        kwargs.pop("run_manager", None)
        return _loop_of(original, original.name).run(lambda: original._arun(*args, **kwargs))

    return _with_methods(original, _run=run_sync)


_FRAMES_OF_RUN = 2  # Frames of an error that `_run` itself raises: the caller's and its own


def _with_methods(original: BaseTool, **methods: Callable[..., Any]) -> BaseTool:
    """Copy a tool of a user's class, with other methods; those that call the original's share its attributes."""
    copied = original.model_copy()
    for name, method in methods.items():
        object.__setattr__(copied, name, method)  # Pydantic takes it for a private attribute
    return copied


def contain_tool(original: BaseTool, *, asynchronous: bool) -> BaseTool:
    """Return a tool whose code can neither end the program nor, in an event loop, block it; see `foreign_code`.

    In `ainvoke`, a function runs in a thread of its own, so that calls that never return hold up no others.
    """
    tool = _with_contained_code(original, asynchronous=asynchronous)
    # Validators, handlers of errors, and methods that a user's class overrides, are foreign code as well.
    if not asynchronous:
        return _with_methods(tool, invoke=_contain_function(tool.invoke))
    kind, is_function = type(original), getattr(original, "coroutine", None) is None
    if kind.invoke is not BaseTool.invoke and kind.ainvoke in (StructuredTool.ainvoke, Tool.ainvoke) and is_function:
        return _with_methods(tool, ainvoke=_in_thread(tool.invoke))  # LangChain's `ainvoke` calls `invoke` for these
    return _with_methods(tool, ainvoke=_contain_coroutine(tool.ainvoke))


def _with_contained_code(original: BaseTool, *, asynchronous: bool) -> BaseTool:
    """Contain a tool's functions, so that callbacks learn of their errors."""
    original = original if asynchronous else with_sync_call(original)
    if not isinstance(original, (StructuredTool, Tool)):
        if not asynchronous:
            return _with_methods(original, _run=_contain_function(original._run))
        own = type(original)._arun is not BaseTool._arun
        return _with_methods(original, _arun=_contain_coroutine(original._arun) if own else _in_thread(original._run))
    function, coroutine = original.func, original.coroutine
    if not asynchronous and function is not None:
        return original.model_copy(update={"func": _contain_function(function)})
    if coroutine is not None:
        return original.model_copy(update={"coroutine": _contain_coroutine(coroutine)})
    if function is None or "callbacks" in signature(function).parameters:  # these are for a thread of LangChain's own
        return original
    return original.model_copy(update={"coroutine": _in_thread(function)})


def _contain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(function)(foreign_code()(function))


def _contain_coroutine(coroutine: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(coroutine)
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await background.contain(coroutine(*args, **kwargs))

    return run


def _in_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    @wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        if isinstance(manager := kwargs.get("run_manager"), AsyncCallbackManagerForToolRun):
            kwargs["run_manager"] = manager.get_sync()
        call = partial(copy_context().run, _call_for_future, function, *args, **kwargs)
        return await background.contain(background.in_daemon_thread(call))

    return run


def _call_for_future(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function; a future cannot hold `StopIteration`, and tasks take some others of it for their own end."""
    try:
        with foreign_code():
            return function(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error


@contextmanager
def foreign_code() -> Iterator[None]:
    """Raise ForeignCodeError in place of `SystemExit` and the like; `KeyboardInterrupt` passes, as Ctrl-C does."""
    try:
        yield
    except (SystemExit, GeneratorExit, asyncio.CancelledError) as error:
        raise ForeignCodeError(f"it raised {background.describe(error)}") from error


@contextmanager
def _as_tool_exception() -> Iterator[None]:
    """Convert each error to a `ToolException`."""
    try:
        yield
    except GraphBubbleUp:
        raise
    except Exception as error:
        raise ToolException(error_text(error)) from error
