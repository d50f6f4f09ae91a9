"""`lookahead-agent bench precision`: what weights of fewer bits cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.table import Table

from lookahead_agent.bench.precision import compare_precisions, read_solutions
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cli import options
from lookahead_agent.cli.progress_bars import ProgressBars
from lookahead_agent.cli.terminal import Terminal
from lookahead_agent.hardware.choice import Precision


def precision(
    dataset: Annotated[Path, typer.Option("--dataset", help="JSON Lines with question and solution.")],
    precisions: Annotated[
        str, typer.Option("--precisions", help="Of the target, compared with the first.")
    ] = "fp32,int8-weights",
    limit: Annotated[int | None, typer.Option("--limit", min=2, help="How many problems.")] = None,
    model: options.Model = options.DEFAULT_MODEL,
    engine_arg: options.EngineArgument = None,
    out: Annotated[
        Path, typer.Option("--out", dir_okay=False, help="Results, appended; a rerun goes on with them.")
    ] = Path("results/precision.jsonl"),
    as_json: options.AsJson = False,
) -> None:
    """Compare precisions by how likely the target finds worked solutions in each, problem by problem."""
    names = precisions.split(",")
    if unknown := [name for name in names if name not in get_args(Precision)]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(get_args(Precision))}", param_hint="--precisions"
        )
    solutions = read_solutions(dataset, limit)

    def chat_model(chosen: Precision) -> ChatLookahead:
        return options.chat_model(
            model=model,
            draft=None,
            engine_args=engine_arg,
            policy="off",
            token_speculation="none",
            precision=chosen,
            use_running=False,
        )

    results = compare_precisions(
        solutions, [cast("Precision", name) for name in names], out, ProgressBars(), chat_model
    )
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in results]))
        return
    table = Table(box=None)
    for heading in ("precision", "solutions", "perplexity", "nats a token against the first (95 %)"):
        table.add_column(heading, justify="left" if heading == "precision" else "right")
    for result in results:
        against = result.against.shown(lambda value: f"{value:+.4f}") if result.against is not None else ""
        table.add_row(result.precision, str(result.solutions), f"{result.perplexity:.4f}", against)
    Terminal().print(table)
