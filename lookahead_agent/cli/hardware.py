"""`lookahead-agent hardware` and `doctor`: the configuration of a pair of models here, and what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import WIDE, ProgressBars, Terminal, as_rich
from lookahead_agent.engines.vllm_config import require_vllm
from lookahead_agent.hardware.diagnostics import Check, Machine, diagnose
from lookahead_agent.hardware.inventory import gpus, processor
from lookahead_agent.models import choose_models, fetch
from lookahead_agent.runtime.engine_selection import RuntimeSpec, select_engines

_SIGNS = {"ok": Text("✓", "green"), "missing": Text("✗", "red"), "optional": Text("–", "yellow")}


def hardware(
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    steps: Annotated[bool, typer.Option("--steps", help="As if step speculation were forced.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show this machine's processor and GPUs, and the configuration of a pair of models on it."""
    require_vllm()
    bars, models = ProgressBars(), choose_models(model, draft)
    assert models.draft is not None  # one was asked for
    setup = select_engines(
        RuntimeSpec(models, draft_engine=steps), fetch(models.target, bars), fetch(models.draft, bars)
    )
    found = {
        "processor": processor(),
        "gpus": gpus(),
        "speculation_method": setup.speculation_method,
        "precision": dict(setup.precision),
        "reason": setup.reason or "on a GPU the models run as their folders have them",
    }
    if as_json:
        typer.echo(json.dumps(found))
        return
    show = Terminal(width=WIDE)
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{role} {kernel}" for role, kernel in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        if value:
            show.print(f"{name.replace('_', ' ')}: {value}")


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
