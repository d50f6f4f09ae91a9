"""`lookahead-agent bench synthetic`: the speed of each mode against theory, with acceptance that is drawn."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lookahead_agent.bench.report import check_report_name
from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import WIDE, ProgressBars, Terminal, as_rich
from lookahead_agent.cost_model.costs import read_costs, write_costs
from lookahead_agent.cost_model.pair import PAIR_MEASUREMENT
from lookahead_agent.cost_model.synthetic import (
    SPECULATION,
    STEPS_ONLY,
    SyntheticSettings,
    result_table,
    results,
    write_synthetic_report,
)
from lookahead_agent.cost_model.synthetic_bench import SyntheticBench
from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.errors import EngineError
from lookahead_agent.hardware.choice import Kernel

_UNFINISHED = 75  # Exit status of a run that its time limit ended: EX_TEMPFAIL, run it again
_DUMMY = "Make weights up from the models' configurations."
_MODES = (
    f"Modes of generation; off is always measured. Default: {','.join(SPECULATION)}; on a CPU {','.join(STEPS_ONLY)}."
)
_TOKEN_ALPHA = "Probability that a draft token is accepted."
_PRECISION = "Of the target's weights. Default: as vLLM has them."
_SECONDS = "Begin nothing new after so long; the same command continues."


def synthetic(
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    dummy_weights: Annotated[bool, typer.Option("--dummy-weights", help=_DUMMY)] = False,
    modes: Annotated[str | None, typer.Option(help=_MODES)] = None,
    alphas: Annotated[str, typer.Option(help="Probabilities that a step is accepted.")] = "0.4,0.6,0.8",
    depths: Annotated[str, typer.Option(help="Steps ahead.")] = "1,2,4,8",
    replies: Annotated[str, typer.Option(help="Replies at once, such as 1,8,32.")] = "1",
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 32,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a reply.")] = 16,
    token_alpha: Annotated[float, typer.Option(min=0, max=1, help=_TOKEN_ALPHA)] = 0.7,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens for each forward pass.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each configuration, in turns.")] = 3,
    precision: Annotated[Kernel | None, typer.Option(help=_PRECISION)] = None,
    draft_precision: Annotated[Kernel | None, typer.Option(help="The same of the draft's.")] = None,
    costs: options.Costs = None,
    seconds: Annotated[float | None, typer.Option(min=1, help=_SECONDS)] = None,
    engine_arg: options.EngineArgument = None,
    out: options.Out = Path("results/synthetic.jsonl"),
    report: Annotated[Path | None, typer.Option(dir_okay=False, help="Write tables and a picture (.md).")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure each mode's speed at acceptance rates that you choose, against theory.

    Steps end by their number of tokens, and acceptance is drawn for each position. Weights may be made up.
    Ends with status 75 where --seconds left something to do.
    """
    settings = SyntheticSettings.model_validate(
        {
            "modes": options.words(modes) if modes is not None else STEPS_ONLY if runs_on_cpu() else tuple(SPECULATION),
            "alphas": options.numbers(alphas, float, "--alphas"),
            "depths": options.numbers(depths, int, "--depths"),
            "replies": options.numbers(replies, int, "--replies"),
            "step_tokens": step_tokens,
            "steps": steps,
            "token_alpha": token_alpha,
            "draft_tokens": draft_tokens,
            "repeats": repeats,
        }
    )
    if report is not None:
        check_report_name(report)
    arguments = options.engine_arguments(engine_arg)
    if not runs_on_cpu():
        arguments.setdefault("max_model_len", settings.context + 256)
    known = read_costs(costs)
    measurement = PAIR_MEASUREMENT.get()
    pair = measurement.pair(
        model,
        draft,
        dummy_weights=dummy_weights,
        engine_args=arguments,
        precision=precision,
        draft_precision=draft_precision,
        progress=ProgressBars(),
        kv_cache_tokens=None if runs_on_cpu() else settings.cached_tokens,
    )
    bench = SyntheticBench(pair, settings, out)

    def measure_costs() -> None:
        nonlocal known
        if costs is not None and known is None:
            known = measurement.costs(pair, settings.batches, ProgressBars())
            write_costs(costs, known)

    whole, failure = False, None
    try:
        whole = bench.run(ProgressBars(), seconds, measure_costs)
    except EngineError as error:  # what the other engines wrote is shown
        failure = error
    found = list(results(bench.rows(), settings, known))
    if report is not None and found:
        write_synthetic_report(report, bench.rows(), found, known)
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in found]))
    else:
        show = Terminal(width=WIDE)
        if known is not None:
            show.print(f"{known.describe()}.\n")
        show.print(as_rich(result_table(found)))
    if failure is not None:
        raise failure
    if not whole:
        Terminal(stderr=True).print(f"{len(bench.rows())} of {bench.total} rows are in {out}: run the same again")
        raise typer.Exit(_UNFINISHED)
