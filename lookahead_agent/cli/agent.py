"""`lookahead-agent agent`: a template with any tools, on a question."""

import json
import os
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer
from langchain_core.messages import HumanMessage, convert_to_openai_messages
from langchain_core.tools import BaseTool

from lookahead_agent.agents.checkpoints import checkpointer
from lookahead_agent.agents.templates import TEMPLATES, template
from lookahead_agent.agents.tool_sources import KINDS, open_tools, specialists
from lookahead_agent.cli import options
from lookahead_agent.cli.agent_run import Finished, carry_out, node_table
from lookahead_agent.cli.terminal import ProgressBars, Terminal
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.cache import user_folder, writable
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.trace.node_times import spans_of
from lookahead_agent.trace.recorder import TraceRecorder
from lookahead_agent.trace.timeline import timeline, write_page

EXAMPLE = "How much do 12 packages of the most expensive product cost?"

_TOOLLESS = ("reflection", "self_consistency")

_QUESTION = "What to work out. Default: an example, or the question of --thread."
_TOOLS = f"A tool: {', '.join(KINDS)}; NAME=SOURCE names it. Repeatable. Default: an example's."
_MCP = "An mcpServers file, whose servers' tools are added."
_ASK_BEFORE = "Ask on the terminal before calls of a tool. Repeatable."
_NODE_POLICY = "Policy of one node. Repeatable."
_COMPARE = "Run it with the default depth first, and say what --depth won or cost."
_THREAD = "Thread id: run again with it to resume, or to ask on once it is answered."
_CHECKPOINTS = "SQLite file of the checkpoints, or a database: postgresql://…"
_TRACE = "Show the run as a page (.html), or record it (.jsonl) for `trace`."
_LIVE = "Show what happens to each step while it runs, in place of the texts."


@options.with_shared
def agent(
    models: options.ReplyOptions,
    question: Annotated[str | None, typer.Argument(help=_QUESTION)] = None,
    name: Annotated[str, typer.Option("--template", help=f"Which graph: {', '.join(TEMPLATES)}.")] = "plan_execute",
    tools: Annotated[list[str] | None, typer.Option(metavar="SOURCE", help=_TOOLS)] = None,
    mcp: Annotated[Path | None, typer.Option(help=_MCP, dir_okay=False)] = None,
    ask_before: Annotated[list[str] | None, typer.Option(metavar="TOOL", help=_ASK_BEFORE)] = None,
    policy: Annotated[str | None, typer.Option(help="Policy of every node. Default: the graph's.")] = None,
    node_policy: Annotated[list[str] | None, typer.Option(metavar="NODE=POLICY", help=_NODE_POLICY)] = None,
    depth: options.Depth = None,
    compare: Annotated[bool, typer.Option("--compare", help=_COMPARE)] = False,
    thread: Annotated[str | None, typer.Option(help=_THREAD)] = None,
    checkpoints: Annotated[str | None, typer.Option(help=_CHECKPOINTS)] = None,
    trace: Annotated[Path | None, typer.Option(help=_TRACE, dir_okay=False)] = None,
    live: Annotated[bool, typer.Option("--live", help=_LIVE)] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run a graph with tools on a question, showing its thoughts, calls, results and answer."""
    options.check_text(question, "QUESTION", empty=False)
    options.check_text(thread, "--thread")
    if name not in TEMPLATES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(TEMPLATES)}", param_hint="--template")
    if live and as_json:
        raise typer.BadParameter("--json prints one object and nothing else", param_hint="--live")
    if trace is not None and trace.suffix not in (".html", ".jsonl"):
        raise typer.BadParameter(f"{trace.name} is neither .html nor .jsonl", param_hint="--trace")
    if compare and (depth is None or thread is not None):
        raise typer.BadParameter("needs --depth, and goes without --thread", param_hint="--compare")
    own: Mapping[str, str] = template("graphs", name).POLICIES
    by_node = options.node_policies(node_policy, own)
    policies = partial(_policies, own, {node: by_node.get(node, policy) for node in own})
    show = Terminal(stderr=True, quiet=True) if as_json else Terminal()
    if checkpoints is None:
        state = user_folder(lambda: platformdirs.user_state_dir("lookahead-agent"), "name a file with --checkpoints")
        checkpoints = str(state / "checkpoints.sqlite")
    with _tools(name, tools, mcp) as made, checkpointer(checkpoints) as saver, _recorded(trace) as recorder:
        build = partial(_built, name, made, ask_before or (), saver)
        thread_id = thread or uuid.uuid4().hex
        llm = models.chat_model(policies=policies(depth))
        asked, start = _start_of(build(llm), question, thread)
        show.heading("question")
        show.print(asked, soft_wrap=True)
        if compare:
            show.print("\nWith the default depth:", style="bold")
            default, _ = _run(models.chat_model(policies=policies(None)), build, start, uuid.uuid4().hex, show)
            show.print(node_table(default.metrics.nodes()))
            show.print(f"\nWith --depth {depth}:", style="bold")
        run, loading = _run(llm, build, start, thread_id, show, recorder=recorder, live=live)
        # Shown before the recorder is closed, which may find the disk full.
        answer = run.answer
        if as_json:
            messages = convert_to_openai_messages(list(run.messages))
            result: dict[str, Any] = {"answer": answer, "messages": messages, "nodes": run.metrics.nodes()}
            result |= {"thread": thread_id, "seconds": run.seconds, "loading_seconds": loading}
            if compare:
                result["default"] = {"seconds": default.seconds, "nodes": default.metrics.nodes()}
            typer.echo(json.dumps(result))
            return
        show.print("\nAnswer:", style="bold", end="")
        show.print(f" {answer}\n", soft_wrap=True)
        show.print(node_table(run.metrics.nodes()))
        show.print(f"{run.seconds:.1f} s in all; before that {loading:.1f} s of loading")
        if compare:
            won = default.seconds - run.seconds
            said = f"won {won:.1f} s" if won > 0 else f"cost {-won:.1f} s"
            other = "" if default.answer == answer else ", and the answers differ"
            show.print(
                f"Draft steps forced by --depth {depth}: {run.seconds:.1f} s, by default {default.seconds:.1f} s. "
                f"They {said} on this machine, in this run{other}."
            )


def _run(
    llm: Any, build: Callable[[Any], Any], start: Any, thread: str, show: Terminal, **options: Any
) -> tuple[Finished, float]:
    """Load the models and run; returns the seconds of loading with the run."""
    with llm:
        begun = time.monotonic()
        llm.start(ProgressBars())
        loading = time.monotonic() - begun
        return carry_out(build(llm), start, thread, show, **options), loading


def _policies(own: Mapping[str, str], given: Mapping[str, str | None], depth: int | None) -> dict[str, VerifierPolicy]:
    """Each node's policy: the one that is given, or the template's; with the depth, where it allows draft steps."""
    with_depth = {node for node, policy in own.items() if given[node] is not None or as_policy(policy).speculates}
    return {
        node: options.policy_of(given[node] or policy, depth if node in with_depth else None)
        for node, policy in own.items()
    }


@contextmanager
def _tools(name: str, sources: Sequence[str] | None, mcp: Path | None) -> Iterator[list[BaseTool]]:
    """The tools that are given; without any, a calculator and a small shop's database."""
    if sources or mcp is not None or name in _TOOLLESS:
        with open_tools(sources or (), mcp) as made:
            yield made
        return
    with tempfile.TemporaryDirectory(prefix="lookahead-shop-") as folder:
        database = Path(folder, "shop.db")
        with closing(sqlite3.connect(database)) as connection:
            connection.executescript(resources.files("lookahead_agent.agents").joinpath("shop.sql").read_text("utf-8"))
        with open_tools([f"sql:{database}", "calculator"]) as made:
            yield made


def _built(name: str, tools: Sequence[BaseTool], ask_before: Sequence[str], saver: Any, llm: Any) -> Any:
    """The template's graph; raises ConfigurationError if it cannot take these tools."""
    build = getattr(template("graphs", name), f"build_{name}")
    given: Any = specialists(tools) if name == "supervisor" else tools
    try:
        return build(llm, given, saver, **({"ask_before": ask_before} if ask_before else {}))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"--template {name}: {error}") from error


@contextmanager
def _recorded(file: Path | None) -> Iterator[TraceRecorder | None]:
    """What records the run, if something does; a run that is interrupted leaves what there was."""
    if file is None:
        yield None
        return
    page = file.suffix == ".html"
    with writable(file):  # found out before a model is loaded
        if page and not os.access(file.parent, os.W_OK):
            raise OSError(f"{file.parent} is no folder that may be written to")
        recorder = TraceRecorder(None if page else file)
    with recorder:
        try:
            yield recorder
        finally:
            if page:
                with writable(file):
                    write_page(timeline(recorder.rows), file, spans_of(recorder.rows))


def _start_of(graph: Any, question: str | None, thread: str | None) -> tuple[str, dict[str, Any] | None]:
    """The question, and the graph's input: the question, or None to go on where the thread was interrupted."""
    state = graph.get_state({"configurable": {"thread_id": thread}}) if thread is not None else None
    before = [message.text for message in state.values.get("messages", ()) if message.type == "human"] if state else []
    if state is not None and state.next and before:
        if question not in (None, before[-1]):
            middle = f"the thread {thread!r} is in the middle of another question: {before[-1]!r}"
            raise ConfigurationError(f"{middle}. Leave the question out to resume it, or choose another --thread.")
        return before[-1], None
    if question is None and before:
        raise ConfigurationError(f"the thread {thread!r} has its answer: ask another question, or choose another")
    asked = question or EXAMPLE
    return asked, {"messages": [HumanMessage(asked)]}
