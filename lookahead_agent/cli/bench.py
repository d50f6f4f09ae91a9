"""`lookahead-agent bench`: tasks × modes × policies, measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead_agent.bench.config import MODES, TASKS, BenchConfig, load_config, make_config, packaged_configs
from lookahead_agent.bench.runner import Bench
from lookahead_agent.bench.samples import Sample
from lookahead_agent.cli import options
from lookahead_agent.cli.bench_datasets import datasets, fetch
from lookahead_agent.cli.bench_overhead import overhead
from lookahead_agent.cli.bench_precision import precision as precision_command
from lookahead_agent.cli.bench_report import compare, report, show_summary
from lookahead_agent.cli.bench_synthetic import synthetic
from lookahead_agent.cli.progress_bars import ProgressBars
from lookahead_agent.cli.terminal import Terminal

bench = typer.Typer(
    help="Measure agents: how fast, how right, and why.", invoke_without_command=True, rich_markup_mode="rich"
)

bench.command()(report)
bench.command()(compare)
bench.command()(datasets)
bench.command()(fetch)
bench.command()(overhead)
bench.command()(precision_command)
bench.command()(synthetic)


@bench.callback()
def run(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", help=f"A TOML file, or one of: {', '.join(packaged_configs())}.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help=f"{', '.join(TASKS)}. Repeatable.")] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help='JSON Lines with question and answer, or "own".')
    ] = None,
    answer: Annotated[
        str | None, typer.Option("--answer", help="How answers are compared: number, math, choice or code.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Put after each question.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="How many problems of each task.")] = None,
    skip: Annotated[int | None, typer.Option("--skip", min=0, help="Problems to leave out at the beginning.")] = None,
    modes: Annotated[str | None, typer.Option("--modes", help=f"Some of {','.join(MODES)}.")] = None,
    besides: Annotated[
        str | None,
        typer.Option(
            "--besides",
            help='Other ways of off and auto: in another precision ("off int8"), with a template\'s calls one after '
            'another ("auto one by one"), with a model asked to put calculations into calls ("off bf16 asked").',
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option("--policies", help='Verifier policies of lookahead; "nodes" for each template\'s own.'),
    ] = None,
    depths: Annotated[str | None, typer.Option("--depths", help="Depths to try, such as 1,2,4,8.")] = None,
    widths: Annotated[str | None, typer.Option("--widths", help="Widths to try, such as 1,2.")] = None,
    schedules: Annotated[str | None, typer.Option("--schedules", help="async, sync or async,sync.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Replies to each problem.")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", min=1, help="Problems at once.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Most tokens of a reply.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Probability mass that is sampled from.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=0, help="Likeliest tokens that are sampled from; 0: no limit.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the first sample; without it, replies have none.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Target model.")] = None,
    draft: options.Draft = None,
    judge: Annotated[str | None, typer.Option("--judge", help="A judge of its own.")] = None,
    token_speculation: Annotated[
        str | None, typer.Option("--token-speculation", help="Of the modes sd and lr+sd: ngram, suffix, draft_model.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision", help="Of the target in all modes but auto: auto, bf16, fp32, int8 or int8-weights."
        ),
    ] = None,
    extra_device_for_draft: Annotated[
        bool,
        typer.Option(
            "--extra-device-for-draft",
            help="The paper's arrangement: off and sd run on the target's share of the machine alone.",
        ),
    ] = False,
    engine_arg: options.EngineArgument = None,
    out: Annotated[Path, typer.Option("--out", dir_okay=False, help="Results, appended; a rerun resumes.")] = Path(
        "results/bench.jsonl"
    ),
) -> None:
    """Do tasks in several ways, in turns, and append what comes to a file.

    Interrupt it at any time: run again, it goes on. `bench report` shows the results in other forms.
    """
    if context.invoked_subcommand is not None:
        return
    lists = {
        "modes": modes,
        "besides": besides,
        "policies": policies,
        "schedules": schedules,
    }
    numbers = {"depths": depths, "widths": widths}
    of_task = {
        "dataset": dataset,
        "answer": answer,
        "prompt": prompt,
        "limit": limit,
        "skip": skip,
        "samples": samples,
        "concurrency": concurrency,
        "max_tokens": max_tokens,
        **{name: options.words(given) for name, given in lists.items() if given is not None},
        **{name: options.numbers(given, int, f"--{name}") for name, given in numbers.items() if given is not None},
    }
    arguments = options.engine_arguments(engine_arg)
    of_bench: dict[str, Any] = {
        "model": model,
        "draft_model": draft,
        "judge_model": judge,
        "token_speculation": token_speculation,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "precision": precision,
        "extra_device_for_draft": extra_device_for_draft or None,
        "engine_args": arguments or None,
        "draft_engine_args": arguments or None,
    }
    measured = Bench(_merged(config, task, of_task, of_bench), out)
    log = Terminal(stderr=True)
    done = measured.total - sum(map(len, measured.missing()))
    log.print(f"{done} of {measured.total} samples are in {out}")

    def report(sample: Sample) -> None:
        nonlocal done
        done += 1
        verdict = {True: "right", False: "wrong", None: "unchecked"}[sample.right]
        log.print(
            f"{done}/{measured.total} {sample.task} {sample.problem} {sample.configuration}: "
            f"{sample.error or verdict}, {sample.output_tokens} tokens in {sample.seconds:.1f} s",
        )

    show_summary(measured.run(ProgressBars(), report))


def _merged(
    config: str | None, tasks: list[str] | None, of_task: dict[str, Any], of_bench: dict[str, Any]
) -> BenchConfig:
    """The configuration, with what the options say in place of what it says."""
    base = load_config(config).model_dump(exclude_unset=True) if config is not None else {}
    changes = {name: value for name, value in of_task.items() if value is not None}
    if tasks:
        known = {task.get("name") or task["task"]: task for task in base.get("tasks", ())}
        base["tasks"] = [known.get(name, {"task": name}) for name in tasks]
    base["tasks"] = [{**task, **changes} for task in base.get("tasks") or [{}]]
    return make_config(base | {name: value for name, value in of_bench.items() if value is not None})
