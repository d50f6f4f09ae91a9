"""`lookahead-agent calibrate`: learns from pairs of steps the verifier thresholds that keep a stated risk."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lookahead_agent.bench.problems import dataset_file, read_problems
from lookahead_agent.calibration.collector import Collector
from lookahead_agent.calibration.fit import CANDIDATES, MEASURES, Measure, certificates_of, fit
from lookahead_agent.calibration.pairs import labelled_pairs, pair_file
from lookahead_agent.certificates.certificate import digest, keep
from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import WIDE, ProgressBars, Terminal, as_rich
from lookahead_agent.cpu import format_cores
from lookahead_agent.system.machine import available_cores

calibrate = typer.Typer(
    help="Learn how strict a verifier must be for a stated risk.", no_args_is_help=True, rich_markup_mode="rich"
)

PairFile = Annotated[Path, typer.Argument(help="File of pairs.", dir_okay=False)]
Verifiers = Annotated[str, typer.Option("--verifiers", help=f"Some of {','.join(CANDIDATES)}.")]

_DEFAULT_VERIFIERS = "embedding+results"
_MEASURES = f"What verifiers go by, to be measured: some of {','.join(MEASURES)}."
_JUDGE = "Model that judges: a folder or a Hub id. Default: the target."


@calibrate.command()
@options.with_option_group
def collect(
    models: options.PairOptions,
    dataset: options.Dataset,
    out: options.Out = Path("results/pairs.jsonl"),
    limit: options.Limit = None,
    skip: options.Skip = 0,
    measures: Annotated[str, typer.Option(help=_MEASURES)] = "similarity",
    judge: Annotated[str | None, typer.Option(help=_JUDGE)] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Replies written at the same time.")] = 24,
    max_tokens: options.MaxTokensOption = 512,
    temperature: options.Temperature = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
) -> None:
    """Let target and draft solve problems, label a pair of steps of each by the target's continuations, and measure it.

    Interrupt it at any time: the same command continues.
    """
    names = options.choices(measures, MEASURES, "--measures")
    chosen: tuple[Measure, ...] = tuple(name for name in MEASURES if name in names)
    cores = format_cores(available_cores())
    with models.chat_model(
        token_speculation="none",
        judge_model=judge,
        policy="cascade:depth=1",  # a policy that needs draft, embedder and judge
        cores=(cores, cores),  # most of the time only the target writes
        max_tokens=max_tokens,
        temperature=temperature,
        use_daemon=False,
    ) as llm:
        problems = read_problems(dataset_file(dataset), limit, skip or 0)
        collector = Collector(llm, problems, out, measures=chosen, at_once=at_once, seed=seed)
        collector.run(ProgressBars())
    labels = [pair.changes_outcome for pair in collector.pairs.values()]
    typer.echo(
        f"{len(labels)} pairs: {sum(pair.row.pair.same_text for pair in collector.pairs.values())} of the same text, "
        f"{labels.count(True)} change the outcome, {labels.count(None)} not known yet"
    )


@calibrate.command("fit")
def fit_command(pairs: PairFile, verifiers: Verifiers = _DEFAULT_VERIFIERS, as_json: options.AsJson = False) -> None:
    """Find the most accepting threshold of each risk, and save certificates, which policies with `risk=…` use."""
    labelled = labelled_pairs(pair_file(pairs).rows)
    fits = fit(labelled, [CANDIDATES[name] for name in options.choices(verifiers, CANDIDATES, "--verifiers")])
    certificates = certificates_of(labelled, fits, digest(pairs))
    if certificates:
        file = keep(certificates)
    if as_json:
        typer.echo(json.dumps([certificate.model_dump(mode="json") for certificate in certificates]))
        return
    rows = [
        [
            verifier_fit.candidate.name,
            f"{risk:g}",
            f"{threshold.value:g}",
            f"{threshold.accepted} of {threshold.pairs}",
            str(threshold.errors),
            f"{threshold.bound:.3f}",
        ]
        for verifier_fit in fits
        for risk, threshold in verifier_fit.of_risk.items()
    ]
    show = Terminal(width=WIDE)
    show.print(as_rich((["verifier", "risk", "threshold", "accepted", "errors", "bound"], rows)))
    if not certificates:
        show.print("No threshold keeps any of these risks by so few pairs: policies with a risk remain exact.")
        return
    for certificate in certificates:
        show.print(certificate.describe())
    show.print(f"Kept in {file}")
