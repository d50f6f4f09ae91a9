"""`lookahead-agent doctor`: what is there, what is missing, and the command that mends it."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.table import Table
from rich.text import Text

from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import WIDE, Terminal
from lookahead_agent.hardware.checkup import Finding, checkup
from lookahead_agent.models import choose_models

_SIGNS = {"there": Text("✓", "green"), "missing": Text("✗", "red"), "optional": Text("–", "yellow")}


def doctor(
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what is here of all that a pair of models needs, and what mends what is not.

    Loads and fetches nothing. Exit status 1: something is missing without which nothing is written."""
    findings = checkup(choose_models(model, draft))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        _show(findings)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    show = Terminal(width=WIDE)
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row(_SIGNS[finding.state], finding.what, finding.found)
    show.print(table)
    for title, state in (("Needed", "missing"), ("If you want it", "optional")):
        commands = [finding.mend for finding in findings if finding.state == state and finding.mend is not None]
        if commands:
            show.print(f"\n{title}:")
        for command in commands:
            show.print(f"    {command}", soft_wrap=True)
