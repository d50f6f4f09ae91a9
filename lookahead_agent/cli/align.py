"""`lookahead-agent align`: the draft learns from what the target writes."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from lookahead_agent.align.aligning import Aligned, Aligning
from lookahead_agent.align.aligning import align as align_draft
from lookahead_agent.align.prompts import prompts_of_dataset, prompts_of_traces
from lookahead_agent.align.training import Training
from lookahead_agent.bench.problems import dataset_file
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cli import options
from lookahead_agent.cli.bars import Bars
from lookahead_agent.engines.cores import available_cores, binding
from lookahead_agent.errors import ConfigurationError, MissingExtraError
from lookahead_agent.models.quantize import is_quantized
from lookahead_agent.models.resolve import choose_models, fetch, fetch_tokenizer
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.arranging import one_vocabulary

_HOW = Training()


def align(
    dataset: Annotated[str | None, typer.Option("--dataset", help="JSON Lines with questions.")] = None,
    traces: Annotated[
        list[Path] | None, typer.Option("--traces", help="Recorded runs (agent --trace). Repeatable.", dir_okay=False)
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="How many questions of the dataset.")] = None,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Questions to leave out at the beginning.")] = 0,
    replies: Annotated[int, typer.Option("--replies", min=1, help="Of the target, to learn from.")] = 256,
    held_back: Annotated[int, typer.Option("--held-back", min=1, help="Prompts to measure on.")] = 48,
    policy: Annotated[str, typer.Option("--policy", help="By which steps are accepted.")] = "balanced",
    epochs: Annotated[float, typer.Option("--epochs", min=0.01, help="How often each reply is seen.")] = _HOW.epochs,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of what is learnt (LoRA).")] = _HOW.rank,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", min=1e-8, help="At its highest.")
    ] = _HOW.learning_rate,
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder; a rerun goes on.")] = Path(
        "results/aligned"
    ),
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    precision: options.TargetPrecision = "auto",
    draft_precision: options.DraftPrecision = "auto",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the training.")] = 0,
    engine_arg: options.EngineArgument = None,
    as_json: options.AsJson = False,
) -> None:
    """Train the draft on what the target replies to your prompts, and keep it if more of its steps then stand.

    Interrupt it at any time: run again, it goes on.
    """
    if (dataset is None) == (not traces):
        raise typer.BadParameter("give --dataset or --traces", param_hint="--dataset")
    if find_spec("peft") is None:
        raise MissingExtraError("training needs the package peft: pip install 'lookahead-agent[align]'")
    rules = as_policy(policy)
    if not rules.speculates:
        raise typer.BadParameter(f"{policy} accepts no draft steps", param_hint="--policy")
    prompts = prompts_of_traces(traces) if traces else prompts_of_dataset(dataset_file(str(dataset)), limit, skip)
    draft_folder = _draft_folder(model, draft)
    cores = binding(available_cores())

    chat_model = partial(
        options.chat_model,
        model=model,
        engine_args=engine_arg,
        token_speculation="none",
        precision=precision,
        max_tokens=max_tokens,
        temperature=temperature,
        use_running=False,
    )
    # In rounds the target waits for its draft, so that no step depends on how fast this machine is.
    in_rounds = rules.model_copy(update={"synchronous": True, "depth": 4})

    def together(folder: str) -> ChatLookahead:
        return chat_model(draft=folder, policy=in_rounds, draft_precision=draft_precision, cores=(cores, cores))

    def alone() -> ChatLookahead:
        return chat_model(draft=None, policy="off")

    how = Training(epochs=epochs, rank=rank, learning_rate=learning_rate, seed=seed)
    found = align_draft(
        prompts,
        Aligning(alone, together, draft_folder, in_rounds.model_dump_json(), replies, held_back, how, out),
        Bars(),
    )
    typer.echo(found.model_dump_json() if as_json else _said(found))


def _draft_folder(model: str, draft: str | None) -> Path:
    """The folder of the draft.

    Raises:
        ConfigurationError: There is no draft, its weights cannot be trained, or it has other tokens than the target.
        ModelError: A model cannot be had.
    """
    models = choose_models(model, draft)
    assert models.draft is not None  # one was asked for
    folder = fetch(models.draft, Bars())
    if is_quantized(folder):
        raise ConfigurationError(f"{folder.name} is quantized, and only weights in floating point can be trained")
    if not one_vocabulary(fetch_tokenizer(models.target, Bars()), folder):
        raise ConfigurationError(
            f"{folder.name} has another tokenizer than the target, whose tokens it is to learn: choose another draft"
        )
    return folder


def _said(found: Aligned) -> str:
    points = "" if found.gain is None else f" ({100 * found.gain[0]:+.1f} to {100 * found.gain[1]:+.1f} points)"
    lines = [
        f"steps that stand: {found.steps_before:.1%} before, {found.steps_after:.1%} after{points}",
        f"tokens that agree: {found.tokens.before:.1%} before, {found.tokens.after:.1%} after",
        f"kept: use it with --draft {found.draft}"
        if found.kept
        else "not kept: the draft follows its target no better than chance explains",
    ]
    return "\n".join(lines)
