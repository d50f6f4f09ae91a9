"""The commands, and what becomes of errors and signals."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from lookahead_agent import __version__
from lookahead_agent.cli.agent import agent
from lookahead_agent.cli.ask import ask
from lookahead_agent.cli.bench import bench
from lookahead_agent.cli.machine import machine
from lookahead_agent.cli.models import models
from lookahead_agent.cli.new import new
from lookahead_agent.cli.plan import plan
from lookahead_agent.cli.serve import serve
from lookahead_agent.cli.trace import trace
from lookahead_agent.cli.up import down, status, up
from lookahead_agent.errors import ConfigurationError, LookaheadError, ModelNotFoundError

_INTERRUPTED = 130

app = typer.Typer(
    name="lookahead-agent",
    help="Lookahead Reasoning for LangGraph agents, on vLLM engines of this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(ask)
app.command()(agent)
app.command()(up)
app.command()(status)
app.command()(down)
app.command()(serve)
app.command()(new)
app.command()(trace)
app.command()(plan)
app.command()(machine)
app.add_typer(bench, name="bench")
app.add_typer(models, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library does to stderr.")] = False,
) -> None:
    if verbose:
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
        logging.getLogger("lookahead_agent").setLevel(logging.DEBUG)
    else:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")


def main() -> None:
    """Run the command line and exit: 0 if all went well, 2 for bad arguments, 130 after Ctrl-C, 1 otherwise."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(_run())


def _run() -> int:
    errors = Console(stderr=True)
    try:
        app()
    except SystemExit as exit_:  # typer has shown its own errors
        code = exit_.code if isinstance(exit_.code, int) else 1
        if code == _INTERRUPTED:
            errors.print("Interrupted.")
        return code
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        errors.print(f"[red]Error:[/] {name}: {problem['msg']}", highlight=False, soft_wrap=True)
        return 2
    except (ConfigurationError, ModelNotFoundError) as error:
        errors.print(f"[red]Error:[/] {error}", highlight=False, soft_wrap=True)
        return 2
    except LookaheadError as error:
        errors.print(f"[red]Error:[/] {error}", highlight=False, soft_wrap=True)
        return 1
    finally:
        _shut_down()
    return 0


def _shut_down() -> None:
    from lookahead_agent.engines.processes import child_processes, end_processes
    from lookahead_agent.engines.shared import POOL

    POOL.close()
    # A download or a conversion that a thread of ours was waiting for.
    end_processes(child_processes())


def _interrupt(number: int, _: FrameType | None) -> None:
    # Ending the engines takes a moment, and an impatient second Ctrl-C must not leave them behind.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _terminate(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
