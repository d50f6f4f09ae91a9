"""`lookahead-agent status` and `down`: of the engines that `up` keeps."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import psutil
import typer
from rich.table import Table

from lookahead_agent.cli.terminal import Terminal
from lookahead_agent.errors import EngineError
from lookahead_agent.running.address import log_path
from lookahead_agent.running.connection import ask_keeper

_NOT_RUNNING = 3
"""Exit status of `status` where nothing runs, as service managers have it."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


def status(as_json: AsJson = False) -> None:
    """Tell which engines run in the background; exit status 3 if none do."""
    told = asyncio.run(ask_keeper("status"))
    if told is None:
        if as_json:
            typer.echo("null")
        else:
            Terminal(stderr=True).print("No engines run in the background: lookahead-agent up starts them.")
        raise typer.Exit(_NOT_RUNNING)
    told["memory_bytes"] = _memory(told["pid"])
    told["log"] = str(log_path())
    if as_json:
        typer.echo(json.dumps(told))
        return
    table = Table.grid(padding=(0, 2))
    table.add_row("models", told["models"])
    table.add_row("process", f"{told['pid']}, for {_lasting(told['seconds'])}, {told['memory_bytes'] / 2**30:.1f} GiB")
    table.add_row("replies", f"{told['replies']} written, {told['running']} running")
    table.add_row("engines", told["reason"])
    table.add_row("log", told["log"])
    Terminal().print(table)


def down() -> None:
    """End the engines that run in the background, once the replies that they write are complete."""
    console = Terminal(stderr=True)
    told = asyncio.run(ask_keeper("stop"))
    if told is None:
        console.print("No engines run in the background.")
        return
    if told["running"]:
        console.print(f"Waiting for {told['running']} replies …")
    try:
        psutil.Process(told["pid"]).wait()
    except psutil.NoSuchProcess:
        return
    except psutil.Error as error:
        raise EngineError(f"process {told['pid']} cannot be waited for: {error}") from error


def _memory(pid: int) -> int:
    """Bytes that a process and those that it started hold, each page counted once where the system can tell."""
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss)
    except psutil.Error:  # it ends just now
        return total
    return total


def _lasting(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
