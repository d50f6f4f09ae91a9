"""`lookahead-agent agent`: runs a template with any tools on a question."""

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
from lookahead_agent.cli.agent_run import RunResult, node_table, run_graph
from lookahead_agent.cli.terminal import ProgressBars, Terminal
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.system.files import user_folder, writable
from lookahead_agent.trace.recorder import TraceRecorder
from lookahead_agent.trace.timeline import timeline, write_page

EXAMPLE = "A teapot costs how much, and what do 12 teapots cost with a discount of 15 %?"

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


@options.with_option_group
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
    defaults: Mapping[str, str] = template("graphs", name).POLICIES
    overrides = options.node_policies(node_policy, defaults)
    policies = partial(_policies, defaults, {node: overrides.get(node, policy) for node in defaults})
    show = Terminal(stderr=True, quiet=True) if as_json else Terminal()
    if checkpoints is None:
        state = user_folder(lambda: platformdirs.user_state_dir("lookahead-agent"), "name a file with --checkpoints")
        checkpoints = str(state / "checkpoints.sqlite")
    with _tools(name, tools, mcp) as loaded, checkpointer(checkpoints) as saver, _record_trace(trace) as recorder:
        build = partial(_build_graph, name, loaded, ask_before or (), saver)
        thread_id = thread or uuid.uuid4().hex
        llm = models.chat_model(policies=policies(depth))
        asked_question, start = _graph_input(build(llm), question, thread)
        show.print_heading("question")
        show.text(asked_question)
        if compare:
            show.print("\nWith the default depth:", style="bold")
            default, _ = _run(models.chat_model(policies=policies(None)), build, start, uuid.uuid4().hex, show)
            show.print(node_table(default.metrics.nodes(), default.others))
            show.print(f"\nWith --depth {depth}:", style="bold")
        run, loading = _run(llm, build, start, thread_id, show, recorder=recorder, live=live)
        # Print before closing the recorder, which fails if the disk is full.
        answer = run.answer
        if as_json:
            messages = convert_to_openai_messages(list(run.messages))
            result: dict[str, Any] = {"answer": answer, "messages": messages, "nodes": run.metrics.nodes()}
            result |= {"thread": thread_id, "seconds": run.seconds, "loading_seconds": loading}
            if compare:
                result["default"] = {"seconds": default.seconds, "nodes": default.metrics.nodes()}
            typer.echo(json.dumps(result))
            return
        if not run.answer_shown:
            show.print()
            show.text(f" {answer}", label="Answer:")
        show.print()
        show.print(node_table(run.metrics.nodes(), run.others))
        if run.speed:
            show.text(run.speed)
        show.print(f"{run.seconds:.1f} s in all; before that {loading:.1f} s of loading")
        if compare:
            won = default.seconds - run.seconds
            outcome = f"won {won:.1f} s" if won > 0 else f"cost {-won:.1f} s"
            difference = "" if default.answer == answer else ", and the answers differ"
            show.print(
                f"Draft steps forced by --depth {depth}: {run.seconds:.1f} s, by default {default.seconds:.1f} s. "
                f"They {outcome} on this machine, in this run{difference}."
            )


def _run(
    llm: Any, build: Callable[[Any], Any], start: Any, thread: str, show: Terminal, **options: Any
) -> tuple[RunResult, float]:
    """Load the models and run the graph; return the result and the seconds of loading."""
    with llm:
        load_start = time.monotonic()
        llm.start(ProgressBars())
        loading = time.monotonic() - load_start
        return run_graph(build(llm), start, thread, show, **options), loading


def _policies(base: Mapping[str, str], named: Mapping[str, str | None], depth: int | None) -> dict[str, VerifierPolicy]:
    """Return each node's policy: the one `named` or the template's, with `depth` for named and for speculating ones."""
    with_depth = {node for node, policy in base.items() if named[node] is not None or as_policy(policy).speculates}
    return {
        node: options.policy_of(named[node] or policy, depth if node in with_depth else None)
        for node, policy in base.items()
    }


@contextmanager
def _tools(name: str, sources: Sequence[str] | None, mcp: Path | None) -> Iterator[list[BaseTool]]:
    """Open the given tools; by default, a calculator and the database of a small shop."""
    if sources or mcp is not None or name in _TOOLLESS:
        with open_tools(sources or (), mcp) as opened:
            yield opened
        return
    with tempfile.TemporaryDirectory(prefix="lookahead-shop-") as folder:
        database = Path(folder, "shop.db")
        with closing(sqlite3.connect(database)) as connection:
            connection.executescript(resources.files("lookahead_agent.agents").joinpath("shop.sql").read_text("utf-8"))
        with open_tools([f"sql:{database}", "calculator"]) as opened:
            yield opened


def _build_graph(name: str, tools: Sequence[BaseTool], ask_before: Sequence[str], saver: Any, llm: Any) -> Any:
    """Build the template's graph; raises ConfigurationError if it does not accept these tools."""
    build = getattr(template("graphs", name), f"build_{name}")
    graph_tools: Any = specialists(tools) if name == "supervisor" else tools
    try:
        return build(llm, graph_tools, saver, **({"ask_before": ask_before} if ask_before else {}))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"--template {name}: {error}") from error


@contextmanager
def _record_trace(file: Path | None) -> Iterator[TraceRecorder | None]:
    """Yield a recorder if the run is traced; an interrupted run also leaves its trace page."""
    if file is None:
        yield None
        return
    page = file.suffix == ".html"
    with writable(file):  # fails before a model is loaded
        place = file if file.exists() and not page else file.parent
        if not os.access(place, os.W_OK):
            raise OSError(f"{place} may not be written to")
        recorder = TraceRecorder(None if page else file)
    with recorder:
        try:
            yield recorder
        finally:
            if page:
                with writable(file):
                    write_page(timeline(recorder.rows), file, recorder.rows)


def _graph_input(graph: Any, question: str | None, thread: str | None) -> tuple[str, dict[str, Any] | None]:
    """Return the question and the graph's input, which is None to resume an interrupted thread."""
    state = graph.get_state({"configurable": {"thread_id": thread}}) if thread is not None else None
    earlier = [message.text for message in state.values.get("messages", ()) if message.type == "human"] if state else []
    if state is not None and state.next and earlier:
        if question not in (None, earlier[-1]):
            pending = f"the thread {thread!r} is in the middle of another question: {earlier[-1]!r}"
            raise ConfigurationError(f"{pending}. Leave the question out to resume it, or choose another --thread.")
        return earlier[-1], None
    if question is None and earlier:
        raise ConfigurationError(f"the thread {thread!r} has its answer: ask another question, or choose another")
    text = question or EXAMPLE
    return text, {"messages": [HumanMessage(text)]}
