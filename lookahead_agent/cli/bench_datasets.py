"""`lookahead-agent bench datasets` and `bench fetch`: the paper's datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lookahead_agent.bench.datasets import DATASETS, fetch_dataset
from lookahead_agent.cli.terminal import Terminal, echo


def datasets() -> None:
    """List the paper's datasets, which `bench fetch` downloads."""
    table = Table(box=None)
    for heading in ("name", "on the Hub", "answers"):
        table.add_column(heading)
    for name, dataset in DATASETS.items():
        table.add_row(name, dataset.hub_id, dataset.answer or "not checked: speed only")
    Terminal().print(table)


def fetch(
    name: Annotated[str, typer.Argument(help="A dataset's name.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file. Default: the name with .jsonl.")
    ] = None,
) -> None:
    """Download a dataset and write its problems to a JSON Lines file."""
    file = output or Path(f"{name}.jsonl")
    count = fetch_dataset(name, file)
    echo(f"{count} problems in {file}")
