"""`bench record` records what a pair writes; `bench replay` measures engines of any shape that write it again."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from lookahead_agent.bench.config import TASKS, make_config
from lookahead_agent.bench.problems import OWN, dataset_file, read_problems
from lookahead_agent.bench.record import AskingModel, check_settings, record_reply, request_of
from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import WIDE, ProgressBars, Terminal, as_rich
from lookahead_agent.cost_model.replay_bench import ReplayBench, ReplayPair, ReplaySettings, replay_table
from lookahead_agent.cost_model.synthetic import SPECULATION
from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.errors import EngineError
from lookahead_agent.modes.table import Precision
from lookahead_agent.replay.recording import parse_recordings, read_recordings
from lookahead_agent.replay.replies import RecordedReplies
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile

_UNFINISHED = 75  # Exit status after the time limit: EX_TEMPFAIL, run it again
_TASK = f"Template whose prompts are recorded: {', '.join(TASKS)}. Default: the questions themselves."
_NODE = "Node of the template, whose first call is recorded."
_AHEAD = "Draft steps after each prefix; a replay looks as far ahead at most."
_RECORDED = "A file of `bench record`."
_SHAPE = "Shape of the target: a catalogue name, a folder or a Hub id."
_DUMMY_WEIGHTS = "Make weights up from the models' configurations."
_MODES = f"Modes of generation; off is always measured. Default: {','.join(SPECULATION)}."
_ALPHA = "Draw verdicts with this probability of acceptance. Default: the recorded verdicts."
_SECONDS = "Begin nothing new after so long; the same command continues."
_PRECISION = "Of the target's weights. Default: as vLLM has them."


@options.with_option_group
def record(
    models: options.PairOptions,
    task: Annotated[str, typer.Option(help=_TASK)] = "questions",
    node: Annotated[str, typer.Option(help=_NODE)] = "planner",
    dataset: options.Dataset = OWN,
    limit: options.Limit = 24,
    skip: options.Skip = 0,
    policy: options.Policy = options.DEFAULT_POLICY,
    depth: Annotated[int, typer.Option(min=1, max=16, help=_AHEAD)] = 8,
    max_tokens: options.MaxTokensOption = 256,
    out: options.Out = Path("results/recordings.jsonl"),
) -> None:
    """Record everything that the pair writes to each problem, for `bench replay`.

    Interrupt it at any time: the same command continues.
    """
    chosen = options.policy_of(policy, depth)
    if not chosen.speculates:
        raise typer.BadParameter("it accepts no step: choose another", param_hint="--policy")
    (config,) = make_config({"tasks": [{"task": task, "modes": ["off"], "max_tokens": max_tokens}]}).tasks
    problems = read_problems(dataset_file(dataset), limit, skip or 0)
    file, log = RowFile(out), Terminal(stderr=True)
    settings = {"model": models.model, "policy": chosen.name, "depth": depth, "max_tokens": max_tokens}
    check_settings(file.rows, settings)
    known = {recording.name for recording in parse_recordings(out, file.rows)}
    missing = {f"{task} {problem.id}": problem for problem in problems if f"{task} {problem.id}" not in known}
    log.print(f"{len(problems) - len(missing)} of {len(problems)} problems are recorded in {out}")
    if not missing:
        return
    fields: dict[str, Any] = {"policy": chosen, "temperature": 0.0, "max_tokens": max_tokens, "use_daemon": False}
    fields |= {"token_speculation": "none"}
    with ExitStack() as stack:
        stack.enter_context(file.open_for_writing())
        llm = asking = stack.enter_context(models.chat_model(**fields))
        llm.start(ProgressBars())
        if task != "questions":
            asking = stack.enter_context(AskingModel.of(llm, node))
        for name, problem in missing.items():
            recording = background.run(record_reply(llm, name, request_of(asking, config, problem), depth))
            file.append(recording.model_dump(mode="json"))
            log.print(
                f"{len(file.rows)} {name}: {recording.lookahead.accepted} of {recording.lookahead.steps} steps "
                f"accepted, {sum(len(run.ids) for run in recording.runs)} tokens recorded"
            )


def replay(
    recordings: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help=_RECORDED)],
    model: Annotated[str, typer.Option("--model", help=_SHAPE)] = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    dummy_weights: Annotated[bool, typer.Option("--dummy-weights", help=_DUMMY_WEIGHTS)] = False,
    modes: Annotated[str | None, typer.Option(help=_MODES)] = None,
    depths: Annotated[str, typer.Option(help="Steps ahead.")] = "4",
    replies: Annotated[int, typer.Option(min=1, help="Replies at once.")] = 1,
    limit: options.Limit = None,
    alpha: Annotated[float | None, typer.Option(min=0, max=1, help=_ALPHA)] = None,
    draft_tokens: Annotated[int | None, typer.Option(min=1, help="Draft tokens for each forward pass.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each reply, in turns.")] = 1,
    precision: Annotated[Precision | None, typer.Option(help=_PRECISION)] = None,
    draft_precision: Annotated[Precision | None, typer.Option(help="The same of the draft's.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help=_SECONDS)] = None,
    engine_arg: options.EngineArgument = None,
    out: options.Out = Path("results/replay.jsonl"),
) -> None:
    """Measure each mode's speed on engines of any shape that write recorded replies, token for token.

    Exit status 75: --seconds left something to measure.
    """
    fields: dict[str, Any] = {
        "depths": options.numbers(depths, int, "--depths"),
        "replies": replies,
        "alpha": alpha,
        "draft_tokens": draft_tokens,
        "repeats": repeats,
    }
    settings = ReplaySettings.model_validate(fields | ({"modes": options.words(modes)} if modes is not None else {}))
    recorded = RecordedReplies(read_recordings(recordings, limit))
    longest = max(len(reply.prompt) + reply.recording.max_tokens for reply in recorded.replies)
    pair = ReplayPair(
        model,
        draft,
        dummy_weights=dummy_weights,
        engine_args=options.engine_arguments(engine_arg),
        precision=precision,
        draft_precision=draft_precision,
        progress=ProgressBars(),
        # Of each engine: the steps ahead of a reply are about as long as a reply, and a prompt is cached once.
        kv_cache_tokens=None if runs_on_cpu() else max(2 * replies, 4) * longest,
    )
    with TemporaryDirectory(prefix="lookahead-replay-") as folder:
        pair.replay(recorded, Path(folder))
        bench = ReplayBench(pair, recorded.replies, settings, out)
        complete, failure = False, None
        try:
            complete = bench.run(ProgressBars(), seconds)
        except EngineError as error:  # results that are complete are still shown
            failure = error
    Terminal(width=WIDE).print(as_rich(replay_table(bench.rows())))
    if failure is not None:
        raise failure
    if not complete:
        Terminal(stderr=True).print(f"{len(bench.rows())} of {bench.total} rows are in {out}: run the same again")
        raise typer.Exit(_UNFINISHED)
