"""The command group, error messages, exit codes and signal handlers."""

import atexit
import errno
import importlib.metadata
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from lookahead_agent.cli.terminal import LogFormatter, Terminal
from lookahead_agent.errors import ConfigurationError, LookaheadError, ModelNotFoundError, validation_message
from lookahead_agent.system.plain_text import plain

_BY_SIGNAL = 128  # Exit statuses from here on: the number of the signal is added
_INTERRUPTED = _BY_SIGNAL + signal.SIGINT
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG})

_COMMANDS = (
    "ask", "agent", "up", "status", "down", "serve", "new", "trace", "estimate", "calibrate", "doctor",
    "bench", "models",
)  # fmt: skip
_MODULES = {"up": "serve", "status": "serve", "down": "serve", "doctor": "models"}
"""Modules of the commands whose module has another name."""

_OF_LINUX = ("fcntl", "resource")
"""Modules of Python that Windows lacks."""

CHAT_CLASS: ContextVar[Callable[..., Any] | None] = ContextVar("chat_class", default=None)
"""Replaces `ChatLookahead` in tests, by a model without engines."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Remove terminal sequences from usage errors, which quote arguments and which Typer prints itself."""
    try:
        yield
    except _UsageError as error:
        vars(error)["message"] = plain(str(vars(error)["message"]))
        raise


def _linux_only(command: str) -> Callable[..., None]:
    """Return a command in place of one whose modules this system lacks."""

    def refuse(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        raise LookaheadError(f"{command} needs Linux: use WSL 2, or engines behind a server (--base-url)")

    refuse.__doc__ = "Needs Linux."
    return refuse


class _Commands(TyperGroup):
    """The command group; it imports a command on use, since importing all takes longer than a short reply."""

    make_context = _plain_errors()(TyperGroup.make_context)
    invoke = _plain_errors()(TyperGroup.invoke)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in _COMMANDS and (close := get_close_matches(args[0], _COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        try:
            group = getattr(import_module(f"lookahead_agent.cli.{_MODULES.get(cmd_name, cmd_name)}"), cmd_name)
        except ModuleNotFoundError as error:
            if error.name not in _OF_LINUX:
                raise
            group = _linux_only(cmd_name)
        if not isinstance(group, typer.Typer):
            wrapper = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich", add_completion=False)
            wrapper.command(cmd_name)(group)
            group = wrapper
        command = typer.main.get_command(group)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Commands,
    name="lookahead-agent",
    help="Lookahead Reasoning for LangGraph agents, on vLLM engines of this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(importlib.metadata.version("lookahead-agent"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library does to stderr.")] = False,
) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(name)s: %(message)s" if verbose else "%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if verbose:
        logging.getLogger("lookahead_agent").setLevel(logging.DEBUG)


def main(chat_class: Callable[..., Any] | None = None) -> None:
    """Run the command line and exit: 0 if all went well, 2 for bad arguments, 130 after Ctrl-C, 1 otherwise."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(_BY_SIGNAL + number))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # characters that the locale's encoding lacks are escaped
    code = 1
    try:
        code = run_command(sys.argv[1:], chat_class)
    finally:
        if code >= _BY_SIGNAL:
            logging.disable(logging.WARNING)  # a start in progress would report that its process was killed
        from lookahead_agent.engines.engine_pool import POOL
        from lookahead_agent.engines.processes import child_processes, end_processes

        POOL.close()
        # Downloads and conversions that a thread still waits for.
        end_processes(child_processes())
    _leave(code)


def run_command(arguments: Sequence[str], chat_class: Callable[..., Any] | None = None) -> int:
    """Run a command, print its errors and return the exit code; engines may still run afterwards."""
    errors = Terminal(stderr=True)
    token = CHAT_CLASS.set(chat_class)
    try:
        app(args=list(arguments), prog_name="lookahead-agent")
    except SystemExit as exit_:  # Typer has printed its own errors
        code = exit_.code if isinstance(exit_.code, int) else 1
        if code == _INTERRUPTED:
            errors.print("Interrupted.")
        return code
    except Exception as error:
        match error:
            case ValidationError():
                errors.error(validation_message(error))
                return 2
            case LookaheadError():
                errors.error(error)
                return 2 if isinstance(error, (ConfigurationError, ModelNotFoundError)) else 1
            case OSError(errno=number) if number in _DISK_FULL:
                errors.error(f"{error.filename or 'the output'} cannot be written: {error.strerror}")
            case OSError(errno=number, filename=str() as name) if number in _REFUSED:
                errors.error(f"{name} cannot be used ({error.strerror}): choose another, or change its permissions")
                return 2
            case _:  # a bug: `print` removes terminal sequences from the traceback
                errors.print(traceback.format_exc(), end="", soft_wrap=True)
        return 1
    finally:
        CHAT_CLASS.reset(token)
    return 0


def _leave(code: int) -> NoReturn:
    """Exit after the exit handlers, without the interpreter's teardown, which takes seconds once vLLM is imported."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed before this process started
                stream.flush()
        except OSError as error:  # silent if the reader has closed the pipe
            code = code or 1
            if error.errno in _DISK_FULL and stream is sys.stdout:
                Terminal(stderr=True).error(f"the output cannot be written: {error.strerror}")
    os._exit(code)


def _interrupt(number: int, _: FrameType | None) -> None:
    # A second Ctrl-C must not interrupt the shutdown of the engines, which takes a moment.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
