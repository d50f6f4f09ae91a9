"""`lookahead-agent agent`: the plan-and-execute graph on a question."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer
from langchain_core.runnables import RunnableConfig
from rich.table import Table

from lookahead_agent.agents.checkpoints import checkpointer
from lookahead_agent.agents.metrics import NodeMetrics
from lookahead_agent.agents.templates import build_plan_execute, template
from lookahead_agent.cli import options
from lookahead_agent.cli.live import live as live_view
from lookahead_agent.cli.terminal import ProgressBars, Terminal, as_rich
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.cache import user_folder, writable
from lookahead_agent.plain_text import PlainTextStream
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.trace import TraceRecorder, spans_of, timeline, write_page

EXAMPLE = (
    "A school orders 24 boxes of 18 pencils at $0.45 a pencil and 37 notebooks at $2.80 each. "
    "It gets 15% off the whole bill. How much does it pay?"
)

_NODE_POLICY = "Policy of the {node}. Default: what graphs/plan_execute.py says."
_TOLD = 0.1
"""Seconds in which several replies were written at once, from which that is worth a word."""


def agent(
    question: Annotated[
        str | None, typer.Argument(help="What to work out. Default: an example, or the question of --thread.")
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help=_NODE_POLICY.format(node="planner"))] = None,
    executor_policy: Annotated[
        str | None, typer.Option("--executor-policy", help=_NODE_POLICY.format(node="executor"))
    ] = None,
    finisher_policy: Annotated[
        str | None, typer.Option("--finisher-policy", help=_NODE_POLICY.format(node="finisher"))
    ] = None,
    depth: options.Depth = None,
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    base_url: options.BaseUrl = None,
    draft_url: options.DraftUrl = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    temperature: options.Temperature = None,
    max_plans: Annotated[int, typer.Option("--max-plans", min=1, help="How often the planner may run.")] = 3,
    thread: Annotated[
        str | None,
        typer.Option("--thread", help="Thread id: run again with it to resume after an interruption."),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option("--checkpoints", help="SQLite file of the checkpoints, or a database: postgresql://…"),
    ] = None,
    token_speculation: options.TokenSpeculationMethod = options.DEFAULT_TOKEN_SPECULATION,
    precision: options.TargetPrecision = "auto",
    draft_precision: options.DraftPrecision = "auto",
    engine_arg: options.EngineArgument = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Show the run as a page (.html), or record it (.jsonl) for `trace`.", dir_okay=False
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Show the lanes of draft, target and verifier while it runs, and what waits."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Plan, calculate and answer, showing each step."""
    options.check_text(question, "QUESTION")
    options.check_text(thread, "--thread")
    if question is not None and not question.strip():
        raise typer.BadParameter("the question is empty", param_hint="QUESTION")
    if live and as_json:
        raise typer.BadParameter("--json prints one object and nothing else", param_hint="--live")
    if trace is not None and trace.suffix not in (".html", ".jsonl"):
        raise typer.BadParameter(f"{trace.name} is neither .html nor .jsonl", param_hint="--trace")
    given = {"planner": policy, "executor": executor_policy, "finisher": finisher_policy}
    policies = _policies({node: name for node, name in given.items() if name is not None}, depth)
    llm = options.chat_model(
        model=model,
        draft=draft,
        engine_args=engine_arg,
        base_url=base_url,
        draft_url=draft_url,
        policy=policies["planner"],
        token_speculation=token_speculation,
        precision=precision,
        draft_precision=draft_precision,
        policies=policies,
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature,
    )
    if checkpoints is None:
        state = user_folder(lambda: platformdirs.user_state_dir("lookahead-agent"), "name a file with --checkpoints")
        checkpoints = str(state / "checkpoints.sqlite")
    with checkpointer(checkpoints) as saver, _recorded(trace, live) as recorder:
        graph = build_plan_execute(
            llm, [template("tools", "calculator").calculator], max_plans=max_plans, checkpointer=saver
        )
        metrics = NodeMetrics()
        thread_id = thread or uuid.uuid4().hex
        config: RunnableConfig = {"configurable": {"thread_id": thread_id}, "callbacks": [metrics, *recorder]}
        asked, start = _start_of(graph, config, question, thread)
        show = Terminal(stderr=True, quiet=True) if as_json else Terminal()
        show.heading("question")
        show.print(asked, soft_wrap=True)
        with llm:
            begun = time.monotonic()
            llm.start(ProgressBars())
            started = time.monotonic()
            loading = started - begun
            with live_view(recorder[0], show) if live else nullcontext():
                quiet = Terminal(quiet=True) if live else show
                _show_run(graph.stream(start, config, stream_mode=["messages", "updates"]), quiet)
            seconds = time.monotonic() - started
        state = graph.get_state(config).values
        # Shown before the recorder is closed, which may find the disk full.
        if as_json:
            result = {
                "answer": state["answer"],
                "plan": state["plan"],
                "nodes": metrics.nodes(),
                "seconds": seconds,
                "loading_seconds": loading,
                "at_once": dict(zip(("replies", "several"), metrics.concurrency(), strict=True)),
                "results": state.get("results", []),
                "thread": thread_id,
            }
            typer.echo(json.dumps(result))
            return
        show.print("\nAnswer:", style="bold", end="")
        show.print(f" {state['answer']}\n", soft_wrap=True)
        show.print(_table(metrics.nodes()))
        some, several = metrics.concurrency()
        together = f", several replies at once for {several:.1f} of {some:.1f} s" if several >= _TOLD else ""
        show.print(f"{seconds:.1f} s in all{together}; before that {loading:.1f} s of loading")


def _policies(given: dict[str, str], depth: int | None) -> dict[str, VerifierPolicy]:
    """Each node's policy: the one that is given, or the template's; with the depth, where it allows draft steps."""
    own: dict[str, str] = template("graphs", "plan_execute").POLICIES
    return {
        node: options.policy_of(given.get(node, name), depth if node in given or as_policy(name).speculates else None)
        for node, name in own.items()
    }


@contextmanager
def _recorded(file: Path | None, live: bool) -> Iterator[list[TraceRecorder]]:
    """What records the run, if something does; a run that is interrupted leaves what there was."""
    if file is None:
        yield [TraceRecorder()] if live else []
        return
    page = file.suffix == ".html"
    with writable(file):  # found out before a model is loaded
        if page and not os.access(file.parent, os.W_OK):
            raise OSError(f"{file.parent} is no folder that may be written to")
        recorder = TraceRecorder(None if page else file)
    with recorder:
        try:
            yield [recorder]
        finally:
            if page:
                with writable(file):
                    write_page(timeline(recorder.rows), file, spans_of(recorder.rows))


def _start_of(graph: Any, config: Any, question: str | None, thread: str | None) -> tuple[str, dict[str, str] | None]:
    """The question and the graph's input: the question, or None to go on where the thread was interrupted.

    Raises:
        ConfigurationError: The thread is about another question.
    """
    saved = graph.get_state(config)
    known = saved.values.get("question") if thread is not None else None
    if known is None:
        asked = question or EXAMPLE
        return asked, {"question": asked}
    if question is not None and question != known:
        raise ConfigurationError(
            f"the thread {thread!r} is about another question: {known!r}. Leave the question out to resume it, "
            "or choose another --thread."
        )
    return str(known), None


def _show_run(events: Iterator[tuple[str, Any]], show: Terminal) -> None:
    pieces: PlainTextStream | None = None
    for mode, event in events:
        if mode == "messages":
            chunk, metadata = event
            if metadata["langgraph_node"] == "planner" and chunk.text:
                if pieces is None:
                    show.heading("planner")
                    pieces = PlainTextStream()
                show.print(pieces.feed(chunk.text), end="", soft_wrap=True)
            continue
        for node, update in event.items():
            if node == "planner":
                show.print(pieces.end() if pieces else "", soft_wrap=True)
                pieces = None
                show.heading("plan")
                for number, step in enumerate(update["plan"], 1):
                    show.print(f"{number}. {step}", soft_wrap=True)
                show.heading("executor")
            for result in update["results"] if node == "executor" else ():
                arguments = ", ".join(str(value) for value in result["input"].values())
                call = f"{result['tool']}({arguments})" if result["tool"] else "no call"
                show.print(f"{call} {'failed:' if result['failed'] else '='} {result['output']}", soft_wrap=True)


def _table(nodes: list[dict[str, Any]]) -> Table:
    rows = [
        [
            str(node["node"]),
            node["policy"].partition(":")[0],  # its name: what it changes of that would take a line of its own
            str(node["replies"]),
            str(node["steps"]),
            # Nothing was there to accept where every reply was an action (or the target alone).
            f"{node['acceptance_rate']:.0%}" if any(node["tokens"]["draft"].values()) else "–",
            str(node["output_tokens"]),
            f"{node['seconds']['prompt'] / node['replies']:.1f}",
            f"{node['seconds']['total']:.1f}",
        ]
        for node in nodes
    ]
    headings = ["node", "policy", "replies", "steps", "accepted", "tokens", "first word", "seconds"]
    return as_rich((headings, rows), words=("policy",))
