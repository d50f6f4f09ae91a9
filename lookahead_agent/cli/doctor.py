"""`lookahead-agent doctor`: what is there, what is missing, and the command that mends it."""

import json
from dataclasses import asdict

import typer
from rich.text import Text

from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import WIDE, Terminal, as_rich
from lookahead_agent.hardware.diagnostics import Check, Machine, diagnose
from lookahead_agent.models.resolve import choose_models

_SIGNS = {"ok": Text("✓", "green"), "missing": Text("✗", "red"), "optional": Text("–", "yellow")}


def doctor(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what is here of all that a pair of models needs, and what mends what is not.

    Loads and fetches nothing. Exit status 1: something is missing without which nothing is written."""
    checks = diagnose(choose_models(model, draft), context.find_object(Machine) or Machine())
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
    else:
        _show(checks)
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)


def _show(checks: list[Check]) -> None:
    show = Terminal(width=WIDE)
    rows: list[list[str | Text]] = [[_SIGNS[check.state], check.name, check.found] for check in checks]
    show.print(as_rich((["", "", ""], rows), words=[""]))
    for title, state in (("Needed", "missing"), ("If you want it", "optional")):
        commands = [check.fix for check in checks if check.state == state and check.fix is not None]
        if commands:
            show.print(f"\n{title}:")
        for command in commands:
            show.print(f"    {command}", soft_wrap=True)
