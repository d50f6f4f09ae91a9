"""`lookahead-agent compare`: policies on a file of problems."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lookahead_agent.bench.compare import compare_policies, summarize
from lookahead_agent.bench.problems import read_problems
from lookahead_agent.bench.ties import trace_differences
from lookahead_agent.cli import options
from lookahead_agent.cli.bars import Bars


def compare(
    dataset: Annotated[
        Path,
        typer.Option("--dataset", exists=True, dir_okay=False, help="JSON Lines with id, question, answer."),
    ],
    out: Annotated[Path, typer.Option("--out", dir_okay=False, help="Results, appended; a rerun resumes.")] = Path(
        "results/compare.jsonl"
    ),
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            help="Policies, the first being the baseline. Each may have changes (balanced:depth=8) and a method of "
            "token-level speculation (off+draft_model).",
        ),
    ] = "off,exact,balanced",
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many problems.")] = 10,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Problems to leave out at the file's beginning.")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Problems asked at once.")] = 1,
    depth: options.Depth = None,
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    engine_arg: options.EngineArgument = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare policies on the same problems: right answers, acceptance, speed.

    The policy "off" has an engine of its own on all cores; the others share a pair on divided cores. Every method of
    token-level speculation is an engine more.
    """
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter("no policy is named", param_hint="--policies")
    problems = read_problems(dataset, limit, skip)
    models = {}
    for name in names:
        policy, _, token_speculation = name.partition("+")
        models[name] = options.chat_model(
            model=model,
            draft=draft,
            engine_args=engine_arg,
            policy=options.policy_of(policy, depth if policy != "off" else None),
            token_speculation=token_speculation or "none",
            max_tokens=max_tokens,
            temperature=temperature,
            return_token_ids=True,
        )
    settings: dict[str, Any] = {
        "model": model,
        "draft": draft,
        "depth": depth,
        "concurrency": concurrency,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "engine_args": options.engine_arguments(engine_arg),
    }
    log = Console(stderr=True)

    def report(row: dict[str, Any]) -> None:
        figures = row["lookahead"]
        log.print(
            f"{row['id']} {row['policy']}: {'right' if row['right'] else 'wrong'}, "
            f"{figures['accepted']}/{figures['steps']} steps accepted, "
            f"{len(row['token_ids'])} tokens in {row['seconds']:.1f} s",
            highlight=False,
        )

    with ExitStack() as stack:
        for llm in models.values():
            stack.enter_context(llm).start(Bars())
        rows = compare_policies(problems, models, out, settings, report, concurrency)
        questions = {problem.id: problem.question for problem in problems}
        ties = trace_differences(rows, questions, names[0], models[names[0]])
    summary = summarize(rows, names[0])
    if as_json:
        typer.echo(json.dumps({"settings": settings, "policies": summary, "ties": ties}))
        return
    show = Console(width=None if Console().is_terminal else 200)
    show.print(_table(summary, names[0]))
    for tie in ties:
        show.print(
            f"{tie['id']}: exact differs from {names[0]} at token {tie['at']}, where the target finds the two tokens "
            f"{tie['gap']:.3f} nats apart",
            highlight=False,
        )


def _table(summary: list[dict[str, Any]], baseline: str) -> Table:
    table = Table(box=None)
    table.add_column("policy", no_wrap=True)
    for heading in (
        "right",
        "accepted",
        f"same tokens as {baseline}",
        "tokens/s",
        f"speed against {baseline}",
        "judge calls",
        "wasted target",
        "wasted draft",
    ):
        table.add_column(heading, justify="right")
    for row in summary:
        table.add_row(
            row["policy"],
            f"{row['right']}/{row['replies']}",
            f"{row['acceptance_rate']:.0%}",
            f"{row['same_tokens']}/{row['replies']}",
            f"{row['tokens_per_second']:.2f}",
            "" if row["speedup"] is None else f"{row['speedup']:.2f}",
            f"{row['judge_calls']:.1f}",
            f"{row['wasted']['target']:.2f}",
            f"{row['wasted']['draft']:.2f}",
        )
    return table
