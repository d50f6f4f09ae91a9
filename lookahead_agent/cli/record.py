"""`bench record` records everything that a pair writes to the prompts of problems."""

from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead_agent.bench.config import TASKS, make_config
from lookahead_agent.bench.problems import OWN, dataset_file, read_problems
from lookahead_agent.bench.record import AskingModel, check_settings, record_replies, request_of
from lookahead_agent.bench.runner import check_tools
from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import ProgressBars, Terminal
from lookahead_agent.replay.recording import parse_recordings
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile

_TASK = f"Template whose prompts are recorded: {', '.join(TASKS)}. Default: the questions themselves."
_NODE = "Node of the template, whose first call is recorded."
_AHEAD = "Draft steps after each prefix."


@options.with_option_group
def record(
    models: options.PairOptions,
    task: Annotated[str, typer.Option(help=_TASK)] = "questions",
    node: Annotated[str, typer.Option(help=_NODE)] = "planner",
    dataset: options.Dataset = OWN,
    tools: options.ToolSources = None,
    limit: options.Limit = 24,
    skip: options.Skip = 0,
    policy: options.Policy = options.DEFAULT_POLICY,
    depth: Annotated[int, typer.Option(min=1, max=16, help=_AHEAD)] = 8,
    max_tokens: options.MaxTokensOption = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Problems at once.")] = 4,
    out: options.Out = Path("results/recordings.jsonl"),
) -> None:
    """Record everything that the pair writes to each problem: steps of both models, draft tokens and verdicts.

    Interrupt it at any time: the same command continues.
    """
    chosen = options.policy_of(policy, depth)
    if not chosen.speculates:
        raise typer.BadParameter("it accepts no step: choose another", param_hint="--policy")
    of_task = {"task": task, "modes": ["off"], "max_tokens": max_tokens, "tools": tools or ()}
    (config,) = make_config({"tasks": [of_task]}).tasks
    problems = read_problems(dataset_file(dataset), limit, skip or 0)
    check_tools(config, problems)
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
        requests = {name: request_of(asking, config, problem) for name, problem in missing.items()}
        for first in range(0, len(requests), concurrency):
            some = dict(islice(requests.items(), first, first + concurrency))
            for recording in background.run(record_replies(llm, some, depth)):
                file.append(recording.model_dump(mode="json"))
                log.print(
                    f"{len(file.rows)} {recording.name}: {recording.lookahead.accepted} of {recording.lookahead.steps} "
                    f"steps accepted, {sum(len(run.ids) for run in recording.runs)} tokens recorded"
                )
