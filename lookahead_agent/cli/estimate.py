"""`estimate` predicts a pair's fastest setting on this machine; `bench synthetic` measures it at drawn acceptance."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead_agent.bench.problems import OWN, dataset_file, read_problems
from lookahead_agent.bench.report import check_report_name
from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import WIDE, ProgressBars, Terminal, as_rich
from lookahead_agent.cost_model.costs import MachineCosts, read_costs, write_costs
from lookahead_agent.cost_model.estimator import Acceptance, Setting, best_settings
from lookahead_agent.cost_model.pair import PAIR_MEASUREMENT
from lookahead_agent.cost_model.synthetic import (
    STEPS_ONLY,
    SyntheticSettings,
    result_table,
    results,
    write_synthetic_report,
)
from lookahead_agent.cost_model.synthetic_bench import SyntheticBench
from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.errors import EngineError
from lookahead_agent.modes.table import METHODS, Kernel

_DUMMY_WEIGHTS = "Make weights up from the models' configurations."
_MODES = f"Modes of generation; off is always measured. Default: {','.join(METHODS)}; on a CPU {','.join(STEPS_ONLY)}."
_TOKEN_ALPHA = "Probability that a draft token is accepted."
_PRECISION = "Of the target's weights. Default: as vLLM has them."


def synthetic(
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    dummy_weights: Annotated[bool, typer.Option("--dummy-weights", help=_DUMMY_WEIGHTS)] = False,
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
    seconds: options.Seconds = None,
    engine_arg: options.EngineArgument = None,
    out: options.Out = Path("results/synthetic.jsonl"),
    report: Annotated[Path | None, typer.Option(dir_okay=False, help="Write tables and a picture (.md).")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure each mode's speed at acceptance rates that you choose, against theory.

    Steps have a fixed number of tokens, and acceptance is drawn for each position. Weights may be made up.
    Exit status 75: --seconds left something to measure.
    """
    settings = SyntheticSettings.model_validate(
        {
            "modes": options.words(modes) if modes is not None else STEPS_ONLY if runs_on_cpu() else tuple(METHODS),
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

    complete, failure = False, None
    try:
        complete = bench.run(ProgressBars(), seconds, measure_costs)
    except EngineError as error:  # results that are complete are still shown
        failure = error
    summaries = list(results(bench.rows(), settings, known))
    if report is not None and summaries:
        write_synthetic_report(report, bench.rows(), summaries, known)
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in summaries]))
    else:
        show = Terminal(width=WIDE)
        if known is not None:
            show.print(f"{known.describe()}.\n")
        show.print(as_rich(result_table(summaries)))
    if failure is not None:
        raise failure
    if not complete:
        Terminal(stderr=True).print(f"{len(bench.rows())} of {bench.total} rows are in {out}: run the same again")
        raise typer.Exit(options.UNFINISHED)


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
