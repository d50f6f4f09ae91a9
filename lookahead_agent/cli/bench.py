"""`lookahead-agent bench`: measures tasks × modes × policies on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead_agent.bench.config import (
    BASELINE,
    MODES,
    TASKS,
    BenchConfig,
    chat_model,
    load_config,
    make_config,
    packaged_configs,
)
from lookahead_agent.bench.conversations import load_conversations
from lookahead_agent.bench.parity import Parity, parity
from lookahead_agent.bench.parity_report import ParityReport
from lookahead_agent.bench.problems import OWN
from lookahead_agent.bench.replay import REPLAYED, ReplayBench
from lookahead_agent.bench.report import FORMATS, BaseReport, Report, check_report_name
from lookahead_agent.bench.row_report import RowReport
from lookahead_agent.bench.runner import Bench
from lookahead_agent.bench.samples import Sample, read_results
from lookahead_agent.bench.server_parity import KIND, read_replies
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cli import options
from lookahead_agent.cli.record import record
from lookahead_agent.cli.server_parity import compare_servers
from lookahead_agent.cli.terminal import ProgressBars, Terminal, as_rich, fit
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.resolve import choose_models, fetch_tokenizer
from lookahead_agent.replay.recording import read_recordings
from lookahead_agent.system.jsonl import Row, RowFile

_WIDE = 240
_KEYS = ("configuration", "node", "policy", "mode", "replies", "depth", "α", "version", "template", "precision")
"""Columns that name a row of a report."""

_OUTPUT = f"Also write it: {', '.join(FORMATS)}, by the suffix."
_BASELINE = "Configuration that the others are compared with, such as 'off int8'."
_BY = "Field by which rows of other programs are grouped. Repeatable."
_TASKS = f"{', '.join(TASKS)}. Repeatable."
_CONFIG = f"A TOML file, or one of: {', '.join(packaged_configs())}."
_MODES = f"Some of {','.join(MODES)}."
_VARIANTS = 'The target alone in another precision, such as "off int8".'
_POLICIES = 'Verifier policies of lookahead; "nodes" for each template\'s own.'
_SEED = "Of the first sample. Default: replies have none."
_SPECULATION = "Of the modes sd and lr+sd: ngram, suffix, draft_model."
_PRECISION = "Of the target in all modes but auto: auto, bf16, fp32 or int8."
_PARITY = (
    "Compare all tool calls with those of the target alone, byte for byte. Nodes that speculate do so under "
    '"exact", unless --policies says otherwise.'
)
_AGAINST = (
    "With --parity: an OpenAI-compatible server, as NAME=URL or NAME=MODEL@URL. Repeatable. Further servers are "
    "compared with the first, and a single one with the local model. The environment variable NAME_API_KEY has its key."
)
_PREFIX = "With --against: characters in the descriptions of the packaged tools, which all prompts share."
_TARGET_SHAPE = "Model whose shape the target has: a name, a folder or a Hub id. Default: the recorded one."
_REPLAY_POLICIES = "Policies of lookahead. Default: the recorded one. random:probability=0.45 draws the verdicts."
_REAL_VERIFIER = "Let the policy's verifier judge, in place of the recorded verdicts."
_HEAD = "An EAGLE-3 head drafts in sd and lr+sd. Acceptance of each draft token after accepted ones, such as 0.6,0.5."
_OUT_FILE = "Rows of results, appended; the same command continues them. Default: results/bench.jsonl, or parity.jsonl."


@dataclass(frozen=True)
class TaskOptions:
    """Options of `bench` and `bench peers` that set tasks and models."""

    task: Annotated[list[str] | None, typer.Option("--task", "--template", help=_TASKS)] = None
    dataset: options.Dataset = ""
    limit: options.Limit = None
    skip: options.Skip = None
    concurrency: Annotated[int | None, typer.Option(min=1, help="Problems at once.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Limit of a reply.")] = None
    tools: options.ToolSources = None
    model: Annotated[str | None, typer.Option(help="Target model.")] = None
    draft: options.Draft = None

    def chat_model(self, engine_arg: list[str] | None) -> ChatLookahead:
        """Create the chat model that servers are compared with; nothing is loaded yet."""
        arguments = options.engine_arguments(engine_arg)
        return options.chat_class()(
            model=self.model or options.DEFAULT_MODEL,
            draft_model=self.draft,
            engine_args=arguments,
            draft_engine_args=arguments,
            policy="exact",
            use_daemon=False,
        )


bench = typer.Typer(
    help="Measure agents: speed, accuracy, and their causes.", invoke_without_command=True, rich_markup_mode="rich"
)

bench.command()(record)


@bench.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Results of `bench`; several are taken together.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help=_OUTPUT)] = None,
    baseline: Annotated[str, typer.Option(help=_BASELINE)] = BASELINE,
    by: Annotated[list[str] | None, typer.Option(metavar="FIELD", help=_BY)] = None,
) -> None:
    """Show results as tables, whose intervals are of 95 %."""
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ConfigurationError(f"there is no file {', '.join(missing)}")
    if output is not None:
        check_report_name(output, FORMATS)
    results = report_of([row for file in files for row in RowFile(file).rows], baseline, by or ())
    if output is not None:
        results.write(output)
        Terminal(stderr=True).print(f"{output}", soft_wrap=True)
    show_report(results, Terminal(width=_WIDE))


def report_of(rows: Sequence[Row], baseline: str, by: Sequence[str]) -> BaseReport:
    """Return the report of the rows of `bench` or of another program."""
    if rows and rows[0].get("kind") == KIND:
        if by or baseline != BASELINE:
            raise typer.BadParameter("replies of servers are compared with the first server", param_hint="--by")
        return ParityReport(read_replies(rows))
    if not rows or any({"schema_version", "kind"} & row.keys() for row in rows):
        if by:
            raise typer.BadParameter("rows of `bench` are compared by configuration", param_hint="--by")
        return Report(read_results(rows), baseline)
    if baseline != BASELINE:
        raise typer.BadParameter("only rows of `bench` have another baseline", param_hint="--baseline")
    return RowReport(rows, by)


def show_report(results: BaseReport, show: Terminal) -> None:
    """Print the tables of a report, each in as many parts as the terminal's width needs."""
    show.print(results.conditions())
    for title, tables in results.sections():
        if title:
            show.print(f"\n{title}", style="bold")
        for part in (part for table in tables for part in fit(show, table, words=_KEYS)):
            show.print()
            show.print(part)


@bench.callback()
@options.with_option_group
def run(
    context: typer.Context,
    shared: TaskOptions,
    config: Annotated[str | None, typer.Option(help=_CONFIG)] = None,
    modes: Annotated[str | None, typer.Option(help=_MODES)] = None,
    variants: Annotated[str | None, typer.Option(help=_VARIANTS)] = None,
    policies: Annotated[str | None, typer.Option(help=_POLICIES)] = None,
    depths: Annotated[str | None, typer.Option(help="Depths to try, such as 1,2,4,8.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Replies to each problem.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help=_SEED)] = None,
    token_speculation: Annotated[str | None, typer.Option(help=_SPECULATION)] = None,
    precision: Annotated[str | None, typer.Option(help=_PRECISION)] = None,
    engine_arg: options.EngineArgument = None,
    with_parity: Annotated[bool, typer.Option("--parity", help=_PARITY)] = False,
    against: Annotated[list[str] | None, typer.Option(metavar="NAME=URL", help=_AGAINST)] = None,
    prefix: Annotated[int | None, typer.Option(min=0, help=_PREFIX)] = None,
    out: Annotated[Path | None, typer.Option("--out", dir_okay=False, help=_OUT_FILE)] = None,
) -> None:
    """Run tasks in several configurations, in turns, and append each result to a file.

    Interrupt it at any time: the same command continues. `bench report` shows the results again.
    """
    if context.invoked_subcommand is not None:
        return
    if against or prefix is not None:
        if not (against and with_parity):
            raise typer.BadParameter("servers are compared by --parity --against NAME=URL", param_hint="--against")
        unused: dict[str, object] = {
            "config": config,
            "modes": modes,
            "variants": variants,
            "policies": policies,
            "depths": depths,
        }
        unused |= {"task": shared.task, "tools": shared.tools, "token-speculation": token_speculation}
        unused |= {"precision": precision}
        models: dict[str, object] = {"model": shared.model, "draft": shared.draft, "engine-arg": engine_arg}
        if given := [f"--{name}" for name, value in (unused | models if len(against) > 1 else unused).items() if value]:
            raise typer.BadParameter(f"these servers have no use for {', '.join(given)}", param_hint="--against")
        compared = compare_servers(
            against,
            load_conversations(shared.dataset or OWN, shared.limit, shared.skip or 0, prefix),
            partial(shared.chat_model, engine_arg),
            out or Path("results/parity.jsonl"),
            samples=samples or 2,
            concurrency=shared.concurrency,
            sampling={"max_tokens": shared.max_tokens or 512, "temperature": temperature or 0.0}
            | ({"seed": seed} if seed is not None else {}),
        )
        _show_server_parity(compared)
        return
    lists = {"modes": modes, "variants": variants, "policies": policies}
    of_task = {
        "samples": samples,
        "parity": True if with_parity and policies is None else None,
        **{name: options.words(text) for name, text in lists.items() if text is not None},
        "depths": options.numbers(depths, int, "--depths") if depths is not None else None,
    }
    arguments = options.engine_arguments(engine_arg)
    of_bench: dict[str, Any] = {"token_speculation": token_speculation, "temperature": temperature, "seed": seed}
    of_bench |= {"precision": precision, "engine_args": arguments or None, "draft_engine_args": arguments or None}
    measured = _measure(_bench(_merge(config, shared, of_task, of_bench), out or Path("results/bench.jsonl")))
    if with_parity and not _show_parity(parity(measured)):
        raise typer.Exit(1)


@bench.command()
@options.with_option_group
def peers(
    peer: Annotated[
        list[str], typer.Argument(metavar="NAME=URL...", help="Servers, such as llama.cpp=http://127.0.0.1:8080/v1.")
    ],
    shared: TaskOptions,
    modes: Annotated[str, typer.Option(help=_MODES)] = "auto",
    out: options.Out = Path("results/peers.jsonl"),
) -> None:
    """Run tasks on OpenAI-compatible servers of other programs too, in turns; speed is that against the first server.

    Start the servers first, with the same model. They get the prompts and tools that the library's own engines get.
    """
    _measure(_bench(_merge(None, shared, {"peers": peer, "modes": options.words(modes)}, {}), out))


@bench.command()
def replay(
    recordings: Annotated[Path, typer.Argument(metavar="RECORDINGS", help="A file of `bench record`.")],
    target_shape: Annotated[str | None, typer.Option(help=_TARGET_SHAPE)] = None,
    draft_shape: Annotated[str | None, typer.Option(help="The same for the draft.")] = None,
    modes: Annotated[str, typer.Option(help=f"Some of {','.join(REPLAYED)}.")] = ",".join(REPLAYED),
    policies: Annotated[str | None, typer.Option(help=_REPLAY_POLICIES)] = None,
    depths: Annotated[str | None, typer.Option(help="Depths to try, such as 1,2,4,8.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Recordings at once.")] = 1,
    limit: options.Limit = None,
    real_verifier: Annotated[bool, typer.Option("--real-verifier", help=_REAL_VERIFIER)] = False,
    judge: Annotated[str | None, typer.Option(help="Judge model of the real verifier.")] = None,
    head: Annotated[str | None, typer.Option(help=_HEAD)] = None,
    seconds: options.Seconds = None,
    engine_arg: options.EngineArgument = None,
    out: options.Out = Path("results/replay.jsonl"),
) -> None:
    """Write recorded replies again on engines of any shape, with made-up weights, in every mode.

    The engines work as with real weights: text diverges, drafts start again, and verdicts take their recorded time.
    Exit status 1: a reply has other tokens than recorded. 75: --seconds left something to measure.
    """
    known = read_recordings(recordings, limit)
    recorded = known[0].settings
    models = choose_models(target_shape or str(recorded.get("model", options.DEFAULT_MODEL)), draft_shape)
    assert models.draft is not None  # `choose_models` requires one
    task: dict[str, Any] = {"modes": options.choices(modes, REPLAYED, "--modes"), "concurrency": concurrency}
    task |= {"policies": options.words(policies)} if policies is not None else {}
    task |= {"depths": options.numbers(depths, int, "--depths")} if depths is not None else {}
    replayed = ReplayBench(
        known,
        (fetch_tokenizer(models.target, ProgressBars()), fetch_tokenizer(models.draft, ProgressBars())),
        out,
        task=task,
        engine_args=options.engine_arguments(engine_arg),
        real_verifier=real_verifier,
        judge=judge,
        head=options.numbers(head, float, "--head") if head is not None else (),
        make=options.chat_class(),
    )
    differing = replayed.find_differences(_measure(replayed.bench, seconds))
    for sample in differing:
        Terminal().print(f"{sample.problem}, {sample.configuration}: other tokens than recorded")
    if differing:
        raise typer.Exit(1)
    if replayed.bench.list_missing():
        raise typer.Exit(options.UNFINISHED)


def _bench(config: BenchConfig, out: Path) -> Bench:
    return Bench(config, out, partial(chat_model, make=options.chat_class()))


def _measure(benchmark: Bench, seconds: float | None = None) -> list[Sample]:
    """Measure the samples that are missing in the file, and print all results; begin none after `seconds`."""
    log = Terminal(stderr=True)
    done = benchmark.total - sum(map(len, benchmark.list_missing()))
    log.print(f"{done} of {benchmark.total} samples are in {benchmark.out.path}")

    def on_sample(sample: Sample) -> None:
        nonlocal done
        done += 1
        verdict = {True: "correct", False: "wrong", None: "unchecked"}[sample.correct]
        log.print(
            f"{done}/{benchmark.total} {sample.task} {sample.problem} {sample.configuration}: "
            f"{sample.error or verdict}, {sample.output_tokens} tokens in {sample.seconds:.1f} s",
        )

    results = benchmark.run(ProgressBars(), on_sample, seconds)
    if results:
        show_report(Report(results), Terminal(width=_WIDE))
    return results


def _show_server_parity(results: ParityReport) -> None:
    """Print the differences of servers; exit with status 1 if one is worse than the first."""
    show = Terminal(width=_WIDE)
    show_report(results, show)
    worse = [each for each in results.comparisons if each.worse]
    for each in worse:
        show.print(f"{each.server} is worse than {results.servers[0]}: {', '.join(each.worse)}")
    if worse:
        raise typer.Exit(1)


def _show_parity(compared: Sequence[Parity]) -> bool:
    """Print the runs whose actions speculation changed; return whether the policies kept their promises."""
    show = Terminal(width=_WIDE)
    headings = ["task", "configuration", "runs", "promised equal", "acts", "runs that differ"]
    rows = [
        [each.task, each.configuration, str(each.runs), str(each.promised), str(each.acts), str(len(each.differences))]
        for each in compared
    ]
    show.print("\nparity", style="bold")
    show.print(as_rich((headings, rows), words=("task", "configuration"), no_wrap=True))
    for each in compared:
        for difference in each.differences:
            broken = "PROMISED, and " if difference.promised else ""
            show.print(
                f"{each.task} {difference.problem}, {each.configuration}: {broken}different in {difference.place}"
            )
            show.print(f"  off: {difference.off!r}\n  on:  {difference.on!r}", soft_wrap=True)
    return all(each.holds for each in compared)


def _merge(config: str | None, shared: TaskOptions, of_task: dict[str, Any], of_bench: dict[str, Any]) -> BenchConfig:
    """Merge the settings of the configuration file with the options, which take precedence."""
    base = load_config(config).model_dump(exclude_unset=True) if config is not None else {}
    extra = of_task | {name: value for name, value in vars(shared).items() if name not in ("task", "model", "draft")}
    changes = {name: value for name, value in extra.items() if value not in (None, "")}
    if shared.task:
        known = {task.get("name") or task["task"]: task for task in base.get("tasks", ())}
        base["tasks"] = [known.get(name, {"task": name}) for name in shared.task]
    base["tasks"] = [{**task, **changes} for task in base.get("tasks") or [{}]]
    of_bench |= {"model": shared.model, "draft_model": shared.draft}
    return make_config(base | {name: value for name, value in of_bench.items() if value is not None})
