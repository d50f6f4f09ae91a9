"""`lookahead-agent plan`: the best mode, depth, width and token-level setting for a pair of models here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lookahead_agent.bench.plots import save_svg
from lookahead_agent.bench.problems import OWN, dataset_file, read_problems
from lookahead_agent.cli import options
from lookahead_agent.cli.bars import Bars
from lookahead_agent.cli.tables import as_rich, console
from lookahead_agent.plan.borders import MeasuredPoint, picture
from lookahead_agent.plan.borders import borders as find_borders
from lookahead_agent.plan.cost_file import read_costs, write_costs
from lookahead_agent.plan.costs import MachineCosts
from lookahead_agent.plan.measuring import measure_acceptance, measure_machine
from lookahead_agent.plan.planner import Acceptance, Setting
from lookahead_agent.plan.planner import plan as best_settings

_RATIOS = (0.1, 0.3, 0.5)
_RATES = tuple(eighth / 8 for eighth in range(9))


def plan(
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", min=0, max=1, help="Acceptance rate of steps. Default: measured.")
    ] = None,
    token_alpha: Annotated[
        float | None, typer.Option("--token-alpha", min=0, max=1, help="Acceptance rate of guessed tokens.")
    ] = None,
    step_tokens: Annotated[
        float | None, typer.Option("--step-tokens", min=1, help="Tokens of a step. Default: measured, else 40.")
    ] = None,
    verifier_seconds: Annotated[
        float | None, typer.Option("--verifier-seconds", min=0, help="Seconds of a verdict. Default: measured, else 0.")
    ] = None,
    policy: options.Policy = options.DEFAULT_POLICY,
    dataset: Annotated[str, typer.Option("--dataset", help="Problems on which acceptance is measured.")] = OWN,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many of them.")] = 4,
    tokens_by: Annotated[
        str, typer.Option("--token-speculation", help="Who guesses tokens: draft_model or ngram.")
    ] = "draft_model",
    dummy_weights: Annotated[
        bool,
        typer.Option(
            "--dummy-weights", help="Make weights up from the models' configurations; needs --alpha and --token-alpha."
        ),
    ] = False,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Measured costs: read if the file is there, else written.")
    ] = None,
    borders: Annotated[
        Path | None,
        typer.Option(
            "--borders",
            dir_okay=False,
            help="Draw which way is fastest for every acceptance of steps and tokens, at three cost ratios (.svg; "
            "minutes).",
        ),
    ] = None,
    engine_arg: options.EngineArgument = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what the pair costs on this machine, and predict which way of writing is fastest.

    Dummy weights let a pair be sized before it is downloaded: a token costs the same, whatever it says.
    """
    if tokens_by not in ("draft_model", "ngram"):
        raise typer.BadParameter(f"{tokens_by!r} is neither draft_model nor ngram", param_hint="--token-speculation")
    if borders is not None and borders.suffix != ".svg":
        raise typer.BadParameter(f"{borders.name} is not .svg", param_hint="--borders")
    known = alpha is not None and token_alpha is not None
    if dummy_weights and not known:
        raise typer.BadParameter("made-up weights accept nothing: give --alpha and --token-alpha")
    problems = [] if known else read_problems(dataset_file(dataset), limit)
    arguments = options.engine_arguments(engine_arg)
    measured = read_costs(costs)
    if measured is None:
        measured = measure_machine(
            model,
            draft,
            dummy_weights=dummy_weights,
            engine_args=arguments,
            draft_engine_args=arguments,
            progress=Bars(),
        )
        if costs is not None:
            write_costs(costs, measured)
    found = Acceptance(0.0, 0.0)
    if not known:
        fields: dict[str, Any] = {"policy": options.policy_of(policy, None), "temperature": 0.0, "max_tokens": 256}
        fields |= {"streaming": True, "return_token_ids": True}
        with options.chat_model(model=model, draft=draft, engine_args=engine_arg, use_running=False, **fields) as llm:
            llm.start(Bars())
            found = measure_acceptance(llm, problems, Bars())
    acceptance = Acceptance(
        found.steps if alpha is None else alpha,
        found.tokens if token_alpha is None else token_alpha,
        found.step_tokens if step_tokens is None else step_tokens,
        found.verifier if verifier_seconds is None else verifier_seconds,
    )
    method: Literal["draft_model", "ngram"] = "ngram" if tokens_by == "ngram" else "draft_model"
    settings = best_settings(measured, acceptance, tokens_by=method)
    if borders is not None:
        _draw_borders(borders, measured, acceptance)
    if as_json:
        result = {
            "settings": [asdict(setting) for setting in settings],
            "acceptance": asdict(acceptance),
            "c": measured.c,
            "free_batch": measured.beside.free_batch(),
            "costs": measured.model_dump(),
        }
        typer.echo(json.dumps(result))
        return
    _show(measured, acceptance, settings, method)


def _draw_borders(file: Path, measured: MachineCosts, acceptance: Acceptance) -> None:
    cells = find_borders(measured, _RATIOS, _RATES)
    point = MeasuredPoint(acceptance.steps, acceptance.tokens, measured.c, f"this pair, c = {measured.c:.2f}")
    save_svg(file, picture(cells, [point]))


def _show(measured: MachineCosts, acceptance: Acceptance, settings: list[Setting], method: str) -> None:
    show = console()
    show.print(as_rich(measured.table()))
    show.print(
        f"c = {measured.c:.2f}; {measured.beside.free_batch()} steps at once cost at most a quarter more than one; "
        f"α = {acceptance.steps:.2f}, of tokens {acceptance.tokens:.2f}; {acceptance.step_tokens:.0f} tokens a step, "
        f"{acceptance.verifier:.2f} s a verdict.\n",
        highlight=False,
    )
    headings = ["mode", "predicted speed", "depth", "width", "tokens at once", "as options"]
    rows = [
        [
            setting.mode,
            f"{setting.speedup:.2f}",
            str(setting.depth or ""),
            str(setting.width or ""),
            str(setting.token_depth) if setting.token_depth > 1 else "",
            _options(setting, method),
        ]
        for setting in settings
    ]
    show.print(as_rich((headings, rows), words=("as options",)))


def _options(setting: Setting, method: str) -> str:
    policy = f"--policy balanced:depth={setting.depth}" if setting.depth else "--policy off"
    policy += f":width={setting.width}" if setting.width > 1 else ""
    by = "guided" if setting.mode in ("guided", "lr+guided") else method
    return policy + (f" --token-speculation {by}" if setting.token_depth > 1 else "")
