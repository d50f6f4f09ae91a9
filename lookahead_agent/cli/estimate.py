"""`estimate` predicts a pair's fastest setting on this machine."""

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from lookahead_agent.bench.problems import OWN, dataset_file, read_problems
from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import WIDE, ProgressBars, Terminal, as_rich
from lookahead_agent.cost_model.costs import MachineCosts, read_costs, write_costs
from lookahead_agent.cost_model.estimator import Acceptance, Setting, best_settings
from lookahead_agent.cost_model.pair import PAIR_MEASUREMENT
from lookahead_agent.modes.table import METHODS

_ALPHA = "Acceptance rate of steps. Default: measured."
_STEP_TOKENS = "Tokens of a step. Default: measured, else 40."
_VERIFIER_SECONDS = "Seconds of a verdict. Default: measured, else 0."
_DUMMY = "Make weights up from the models' configurations; needs --alpha and --token-alpha."


@options.with_option_group
def estimate(
    models: options.PairOptions,
    alpha: Annotated[float | None, typer.Option(min=0, max=1, help=_ALPHA)] = None,
    token_alpha: Annotated[float | None, typer.Option(min=0, max=1, help="Acceptance rate of draft tokens.")] = None,
    step_tokens: Annotated[float | None, typer.Option(min=1, help=_STEP_TOKENS)] = None,
    verifier_seconds: Annotated[float | None, typer.Option(min=0, help=_VERIFIER_SECONDS)] = None,
    policy: options.Policy = options.DEFAULT_POLICY,
    dataset: options.Dataset = OWN,
    limit: options.Limit = 4,
    dummy_weights: Annotated[bool, typer.Option("--dummy-weights", help=_DUMMY)] = False,
    costs: options.Costs = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure the costs of the pair on this machine, and predict the fastest setting.

    Dummy weights size a pair before it is downloaded: the cost of a token does not depend on the weights.
    """
    known = alpha is not None and token_alpha is not None
    if dummy_weights and not known:
        raise typer.BadParameter("made-up weights accept nothing: give --alpha and --token-alpha")
    chosen = options.policy_of(policy, None)
    if not known and not chosen.speculates:
        raise typer.BadParameter("it accepts no step: give --alpha and --token-alpha", param_hint="--policy")
    problems = [] if known else read_problems(dataset_file(dataset), limit)
    arguments = options.engine_arguments(models.engine_args)
    measurement = PAIR_MEASUREMENT.get()
    measured = read_costs(costs)
    if measured is None:
        pair = measurement.pair(
            models.model,
            models.draft,
            dummy_weights=dummy_weights,
            engine_args=arguments,
            precision=models.precision,
            draft_precision=models.draft_precision,
            progress=ProgressBars(),
        )
        measured = measurement.costs(pair, progress=ProgressBars())
        if costs is not None:
            write_costs(costs, measured)
    measured_acceptance = Acceptance(0.0, 0.0)
    if not known:
        # A depth forces step speculation, so that the draft gets an engine.
        fields: dict[str, Any] = {"policy": chosen.model_copy(update={"depth": chosen.steps_ahead})}
        fields |= {"temperature": 0.0, "max_tokens": 256, "streaming": True, "return_token_ids": True}
        with models.chat_model(use_daemon=False, **fields) as llm:
            llm.start(ProgressBars())
            measured_acceptance = measurement.acceptance(llm, problems, ProgressBars())
    overrides = {"steps": alpha, "tokens": token_alpha, "step_tokens": step_tokens, "verifier": verifier_seconds}
    acceptance = replace(measured_acceptance, **{name: value for name, value in overrides.items() if value is not None})
    settings = best_settings(measured, acceptance)
    if as_json:
        result: dict[str, Any] = {"settings": [asdict(each) for each in settings], "acceptance": asdict(acceptance)}
        result |= {"c": measured.c, "free_batch": measured.beside.free_batch(), "costs": measured.model_dump()}
        typer.echo(json.dumps(result))
    else:
        _show(measured, acceptance, settings)


def _show(measured: MachineCosts, acceptance: Acceptance, settings: list[Setting]) -> None:
    show = Terminal(width=WIDE)
    show.print(as_rich(measured.table()))
    formats = measured.precision
    models = [name + (f" in {formats[role]}" if role in formats else "") for role, name in measured.models.items()]
    if models:
        show.print(f"{' with '.join(models)}.")
    show.print(
        f"{measured.describe()}; α = {acceptance.steps:.2f}, of tokens {acceptance.tokens:.2f}; "
        f"{acceptance.step_tokens:.0f} tokens a step, {acceptance.verifier:.2f} s a verdict.\n",
    )
    headings = ["mode", "predicted speed", "depth", "width", "tokens at once", "as options"]
    rows = []
    for setting in settings:
        tokens = str(setting.token_depth) if setting.token_depth > 1 else ""
        shape = [str(setting.depth or ""), str(setting.width or ""), tokens]
        flags = f"--policy balanced:depth={setting.depth}" if setting.depth else "--policy off"
        flags += f":width={setting.width}" if setting.width > 1 else ""
        flags += f" --token-speculation {METHODS[setting.mode]}" if setting.token_depth > 1 else ""
        rows.append([setting.mode, f"{setting.speedup:.2f}", *shape, flags])
    show.print(as_rich((headings, rows), words=("as options",)))
