"""`lookahead-agent calibrate`: thresholds of verifiers that keep a stated risk, learnt from pairs of steps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel

from lookahead_agent.bench.plots import save_svg
from lookahead_agent.bench.problems import AnswerKind, dataset_file, read_problems
from lookahead_agent.calibration.collector import CollectionSettings, Collector
from lookahead_agent.calibration.fit import certificates_of, evaluate, fit, kept_risks, split_results
from lookahead_agent.calibration.pairs import LabelledPair, LabelRow, OutcomeRule, labelled_pairs, pair_file
from lookahead_agent.calibration.scores import CANDIDATES, MEASURES, Candidate, Measure, score_pairs
from lookahead_agent.certificates.certificate import digest, keep
from lookahead_agent.certificates.risk import LEVEL, Threshold
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cli import options
from lookahead_agent.cli.progress_bars import ProgressBars
from lookahead_agent.cli.terminal import WIDE, Terminal, as_rich, echo
from lookahead_agent.cpu.cores import binding
from lookahead_agent.engines.processes import available_cores
from lookahead_agent.policy import as_policy

calibrate = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

Pairs = Annotated[Path, typer.Argument(help="File of pairs.", dir_okay=False)]
Verifiers = Annotated[str, typer.Option("--verifiers", help=f"Some of {','.join(CANDIDATES)}.")]
Level = Annotated[
    float, typer.Option("--level", min=0.001, max=0.5, help="Probability that a threshold is riskier than stated.")
]

_DEFAULT_VERIFIERS = "embedding+results"
_ASKED = "Does it change the outcome? y, n, f (forget the label), s (skip), q (quit)"


@calibrate.callback()
def rule_of(
    context: typer.Context,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Continuations from each step at first.")
    ] = OutcomeRule.seeds,
    margin: Annotated[
        int, typer.Option("--margin", min=1, help="By how many the draft's step must fall short to be suspected.")
    ] = OutcomeRule.margin,
    confirm: Annotated[
        int, typer.Option("--confirm", min=1, help="Continuations from each step of a suspected pair.")
    ] = OutcomeRule.confirm,
) -> None:
    """Learn how strict a verifier must be for a stated risk."""
    if margin > seeds:
        raise typer.BadParameter(f"no pair falls short by {margin} of {seeds} continuations", param_hint="--margin")
    context.obj = OutcomeRule(seeds, margin, confirm)


@calibrate.command()
def collect(
    context: typer.Context,
    dataset: options.Dataset,
    out: options.Out = Path("results/pairs.jsonl"),
    limit: options.Limit = None,
    skip: options.Skip = 0,
    answer: Annotated[AnswerKind, typer.Option("--answer", help="How answers are compared.")] = "number",
    temperature_on: Annotated[
        float, typer.Option("--temperature-on", min=0.01, help="Of continuations: they are compared by chance.")
    ] = 0.7,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Replies written at the same time.")] = 24,
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    precision: options.TargetPrecision = "auto",
    draft_precision: options.DraftPrecision = "auto",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    engine_arg: options.EngineArgument = None,
) -> None:
    """Have target and draft write over problems, and label a pair of steps of each by what follows from it.

    Interrupt it at any time: run again, it goes on.
    """
    how = CollectionSettings(answer, context.obj, temperature_on, at_once, seed)
    cores = binding(available_cores())
    with options.chat_model(
        model=model,
        draft=draft,
        engine_args=engine_arg,
        policy="random",  # for a draft engine
        token_speculation="none",
        precision=precision,
        draft_precision=draft_precision,
        cores=(cores, cores),  # they write one after the other
        max_tokens=max_tokens,
        temperature=temperature,
        use_daemon=False,
    ) as llm:
        collector = Collector(llm, read_problems(dataset_file(dataset), limit, skip or 0), how, out)
        collector.run(ProgressBars())
    _show_pairs(collector.pairs, how.rule)


@calibrate.command()
def score(
    pairs: Pairs,
    measures: Annotated[
        str, typer.Option("--measures", help=f"What is measured: some of {','.join(MEASURES)}.")
    ] = "similarity",
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    judge: Annotated[
        str | None, typer.Option("--judge", help="Model that judges: a folder or a Hub id. Default: the target.")
    ] = None,
    precision: options.TargetPrecision = "auto",
    engine_arg: options.EngineArgument = None,
) -> None:
    """Measure what verifiers go by, of pairs that have not been measured yet; appended to their file."""
    names = options.words(measures)
    if unknown := [name for name in names if name not in MEASURES]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(MEASURES)}", param_hint="--measures")
    chosen: list[Measure] = [name for name in MEASURES if name in names]

    def chat_model() -> ChatLookahead:
        return options.chat_model(
            model=model,
            draft=draft,
            engine_args=engine_arg,
            judge_model=judge,
            policy="cascade:depth=1",  # for embedder and judge
            token_speculation="none",
            precision=precision,
            use_daemon=False,
        )

    done = score_pairs(pairs, chosen, chat_model, ProgressBars())
    echo(f"{done} pairs measured: {pairs}")


@calibrate.command()
def label(
    context: typer.Context,
    pairs: Pairs,
    every: Annotated[bool, typer.Option("--every", help="Also pairs that have a person's label.")] = False,
) -> None:
    """Show pairs, and ask whether the draft's step changes the outcome; your label goes before the outcomes."""
    rule: OutcomeRule = context.obj
    file = pair_file(pairs)
    show = Terminal()
    with file.writing():
        for pair in labelled_pairs(file.rows).values():
            if pair.row.same_text or (pair.label is not None and not every):
                continue
            _show_pair(show, pair, rule)
            answer = typer.prompt(_ASKED, default="s").lower()[:1]
            if answer == "q":
                break
            if answer in ("y", "n", "f"):
                row = LabelRow(problem=pair.row.problem, changes_outcome={"y": True, "n": False, "f": None}[answer])
                file.append(row.model_dump(mode="json"))
    _show_pairs(labelled_pairs(file.rows), rule)


@calibrate.command("fit")
def fit_command(
    context: typer.Context,
    pairs: Pairs,
    verifiers: Verifiers = _DEFAULT_VERIFIERS,
    level: Level = LEVEL,
    keep_in: Annotated[
        Path | None,
        typer.Option("--keep-in", file_okay=False, help="Where certificates are kept. Default: by the models."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Find the most accepting threshold of each risk, and keep certificates of it: policies `risk=…` go by them."""
    rule: OutcomeRule = context.obj
    known = labelled_pairs(pair_file(pairs).rows)
    candidates = _candidates(verifiers)
    fits = fit(known, candidates, rule, level)
    found = certificates_of(known, fits, rule, level, digest(pairs))
    if found:
        file = keep(found, keep_in)
    if as_json:
        typer.echo(json.dumps([certificate.model_dump(mode="json") for certificate in found]))
        return
    rows = [
        [each.candidate.name, f"{risk:g}", f"{one.value:g}", *_counts(one), f"{one.bound:.3f}"]
        for each in fits
        for risk, one in each.of_risk.items()
    ]
    show = _show_table(["verifier", "risk", "threshold", "accepted", "errors", "bound"], rows)
    if not found:
        show.print("No threshold keeps any of these risks by so few pairs: policies with a risk remain exact.")
        return
    for certificate in found:
        show.print(certificate.describe())
    show.print(f"Kept in {file}")


@calibrate.command()
def check(
    context: typer.Context,
    pairs: Pairs,
    verifiers: Verifiers = _DEFAULT_VERIFIERS,
    level: Level = LEVEL,
    splits: Annotated[int, typer.Option("--splits", min=1, help="How often the problems are divided.")] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Of the divisions.")] = 0,
    learn_from: Annotated[
        float,
        typer.Option("--learn-from", min=0.1, max=0.9, help="Share of the problems that thresholds are learnt from."),
    ] = 0.5,
    plot: Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Also drawn here, as SVG.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Hold thresholds learnt from some of the problems against the others, again and again."""
    known = labelled_pairs(pair_file(pairs).rows)
    rule: OutcomeRule = context.obj
    found = list(
        split_results(known, _candidates(verifiers), rule, level=level, splits=splits, seed=seed, learn_from=learn_from)
    )
    if plot is not None:
        save_svg(plot, kept_risks(found))
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in found]))
        return
    rows = [
        [
            f"{result.risk:g}",
            f"{result.certified} of {result.splits}",
            f"{result.kept}",
            *((f"{result.errors:.3f}", f"{result.accepted:.0%}") if result.certified else ("", "")),
        ]
        for result in found
    ]
    _show_table(["risk", "splits with a threshold", "risk kept in", "errors of accepted", "accepted"], rows)


@calibrate.command()
def compare(
    context: typer.Context,
    pairs: Pairs,
    policies: Annotated[
        str, typer.Option("--policies", help="Any that go by a threshold.")
    ] = "strict,balanced,fast,embedding:similarity=0.95",
    level: Level = LEVEL,
    as_json: options.AsJson = False,
) -> None:
    """Count the measured pairs that policies accept, and the errors among them, with the policies' own thresholds."""
    known = labelled_pairs(pair_file(pairs).rows)
    rule: OutcomeRule = context.obj
    found = {name: evaluate(known, as_policy(name), rule, level) for name in options.words(policies)}
    if as_json:
        typer.echo(json.dumps({name: asdict(one) for name, one in found.items()}))
        return
    rows = [[name, *_counts(one), f"{one.risk:.3f}", f"{one.bound:.3f}"] for name, one in found.items()]
    _show_table(["policy", "accepted", "errors", "share", "bound"], rows)


def _candidates(verifiers: str) -> list[Candidate]:
    names = list(dict.fromkeys(options.words(verifiers)))
    if not names or (set(names) - set(CANDIDATES)):
        raise typer.BadParameter(f"choose some of {', '.join(CANDIDATES)}", param_hint="--verifiers")
    return [CANDIDATES[name] for name in names]


def _show_pair(show: Terminal, pair: LabelledPair, rule: OutcomeRule) -> None:
    row = pair.row
    of_row = row.pair
    show.rule(row.problem)
    show.print(row.question)
    show.print(row.before, style="dim")
    for title, step in (("draft", of_row.draft), ("target", of_row.target)):
        show.print(Panel(step.text.strip(), title=title))
    known = pair.outcomes
    if known is not None:
        right = f"right from the draft's step {sum(known.draft)}, from the target's {sum(known.target)}"
        show.print(f"{right}, of {len(known.draft)} each")
    if row.false_arithmetic:
        show.print(f"false: {'; '.join(row.false_arithmetic)}")
    labels = {None: "not known yet", True: "changes the outcome", False: "changes nothing"}
    show.print(labels[pair.changes_outcome(rule)])


def _show_pairs(pairs: dict[str, LabelledPair], rule: OutcomeRule) -> None:
    labels = [pair.changes_outcome(rule) for pair in pairs.values()]
    typer.echo(
        f"{len(pairs)} pairs: {sum(pair.row.same_text for pair in pairs.values())} of the same text, "
        f"{labels.count(True)} change the outcome, {labels.count(None)} not known yet"
    )


def _counts(one: Threshold) -> tuple[str, str]:
    return f"{one.accepted} of {one.pairs}", str(one.errors)


def _show_table(headings: list[str], rows: list[list[str]]) -> Terminal:
    show = Terminal(width=WIDE)
    show.print(as_rich((headings, rows)))
    return show
