"""`lookahead-agent hardware`: the processor, and the configuration of a pair of models on it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from lookahead_agent.cli import options
from lookahead_agent.cli.progress_bars import ProgressBars
from lookahead_agent.cli.terminal import WIDE, Terminal
from lookahead_agent.engines.vllm_config import require_vllm
from lookahead_agent.hardware.inventory import gpus, processor
from lookahead_agent.models import choose_models, fetch
from lookahead_agent.runtime.engine_selection import EngineRequest, select_engines


def hardware(
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    steps: Annotated[bool, typer.Option("--steps", help="As if step speculation were forced.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show this machine's processor and GPUs, and the configuration of a pair of models on it."""
    require_vllm()
    bars, models = ProgressBars(), choose_models(model, draft)
    assert models.draft is not None  # one was asked for
    setup = select_engines(EngineRequest(draft_engine=steps), fetch(models.target, bars), fetch(models.draft, bars))
    found = {
        "processor": processor(),
        "gpus": gpus(),
        "speculation_method": setup.speculation_method,
        "precision": dict(setup.precision),
        "reason": setup.reason or "on a GPU the models run as their folders have them",
    }
    if as_json:
        typer.echo(json.dumps(found))
        return
    show = Terminal(width=WIDE)
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{role} {kernel}" for role, kernel in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        if value:
            show.print(f"{name.replace('_', ' ')}: {value}")
