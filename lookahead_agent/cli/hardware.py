"""`lookahead-agent hardware`: what this machine's kernels take, and what is chosen by it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from lookahead_agent.cli import options
from lookahead_agent.cli.progress_bars import ProgressBars
from lookahead_agent.cli.terminal import WIDE, Terminal
from lookahead_agent.engines.vllm_engine import require_vllm, runs_on_cpu
from lookahead_agent.hardware.kernels import KernelTimes, kernel_times
from lookahead_agent.models import choose_models, fetch
from lookahead_agent.runtime.engine_selection import EngineRequest, EngineSetup, select_engines


def hardware(
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    steps: Annotated[bool, typer.Option("--steps", help="As if steps were commanded.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure anew, with nothing else running.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show how fast this machine multiplies in each precision, and how a pair of models is run by that."""
    require_vllm()
    bars = ProgressBars()
    models = choose_models(model, draft)
    times = kernel_times(bars, again=again) if runs_on_cpu() else None
    assert models.draft is not None  # one was asked for
    engine_setup = select_engines(
        EngineRequest(draft_engine=steps), fetch(models.target, bars), fetch(models.draft, bars), bars
    )
    if as_json:
        typer.echo(_as_json(times, engine_setup))
        return
    show = Terminal(width=WIDE)
    if times is not None:
        show.print(_table(times))
        show.print(f"{times.processor}\n")
    show.print(engine_setup.reason or "On a GPU the models run as their folders have them, with a shared draft.")


def _as_json(times: KernelTimes | None, engine_setup: EngineSetup) -> str:
    import json

    return json.dumps(
        {
            "kernels": times.model_dump() if times is not None else None,
            "speculation_method": engine_setup.speculation_method,
            "precision": dict(engine_setup.precision),
            "reason": engine_setup.reason,
        }
    )


def _table(times: KernelTimes) -> Table:
    table = Table(box=None, title="microseconds of a million weights, by tokens in a pass", title_justify="left")
    table.add_column("cores", justify="right")
    table.add_column("precision")
    sizes = sorted({size for of_cores in times.seconds.values() for row in of_cores.values() for size in row})
    for size in sizes:
        table.add_column(str(size), justify="right")
    for cores, kernels in times.seconds.items():
        for kernel, row in kernels.items():
            table.add_row(str(cores), kernel, *(f"{1e6 * row[size]:.0f}" for size in sizes))
    return table
