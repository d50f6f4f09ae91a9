"""Runs a graph on the terminal: streams its texts, prints tool calls and results, and asks for approvals."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, BaseMessageChunk, ToolMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Interrupt
from rich.table import Table
from rich.text import Text

from lookahead_agent.agents.metrics import NodeMetrics
from lookahead_agent.agents.written_calls import format_call
from lookahead_agent.cli.terminal import Terminal, as_rich
from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.errors import LookaheadError
from lookahead_agent.runtime.engine_set import NO_DRAFT
from lookahead_agent.system.plain_text import PlainTextStream
from lookahead_agent.system.texts import truncate
from lookahead_agent.trace.node_times import node_times, spans_of
from lookahead_agent.trace.recorder import TraceRecorder, replies

_MAX_LENGTH = 2000  # Characters of a tool's result that are printed
_LEAST_SECONDS = 0.05  # Least time of a row of `other_times`, which the table rounds to 0.1
# The trace page's colours, as near as terminals have them.
_STYLES = {
    "accepted": "green",
    "committed": "blue",
    "rejected": "red",
    "unused": "bright_blue",
    "aborted": "bright_black",
    "judged": "yellow",
}


_WITHOUT_STEPS = {"off": "the target writes alone", "sd": "this configuration drafts tokens, in the target's engine"}
"""How replies are written in each mode without draft steps."""


class ApprovalNeededError(LookaheadError):
    """A run needs an approval, but standard input has ended."""


@dataclass(frozen=True)
class RunResult:
    """The result of a completed run."""

    messages: Sequence[AnyMessage]  # Messages of the thread
    seconds: float  # duration without the time of waiting for approvals
    metrics: NodeMetrics  # Metrics of its nodes
    others: Sequence[tuple[str, float]] = ()  # seconds of tools, and of neither tools nor replies, by name
    answer_shown: bool = False  # whether the answer is the last text on the terminal
    speed: str = ""  # why no draft steps were written, and what made the replies fast

    @property
    def answer(self) -> str:
        """The last message's text."""
        return self.messages[-1].text


def run_graph(
    graph: Any,
    start: Any,
    thread: str,
    show: Terminal,
    *,
    recorder: TraceRecorder | None = None,
    live: bool = False,
    ask: Callable[[], str] = input,
) -> RunResult:
    """Run a graph with a checkpointer to its end, and ask on the terminal when it is interrupted for an approval.

    Without a `start`, the interrupted thread resumes. `live` prints step events in place of texts. Raises
    ApprovalNeededError if it must ask after the end of standard input; the thread can be resumed.
    """
    metrics, recorder = NodeMetrics(), recorder or TraceRecorder()
    config: RunnableConfig = {"configurable": {"thread_id": thread}}
    view = RunView(show, graph.get_state(config).values.get("messages", ()))
    config["callbacks"] = [metrics, view, recorder, *([LiveSteps(show)] if live else [])]
    seconds = 0.0
    while True:
        started = time.monotonic()
        for mode, event in graph.stream(start, config, stream_mode=["messages", "updates"]):
            if mode == "updates":
                view.update(event)
            elif not live:
                view.piece(event[0])
        seconds += time.monotonic() - started
        state = graph.get_state(config)
        if not state.interrupts:
            messages = state.values["messages"]
            shown = bool(view.last_text.strip()) and view.last_text.strip() == messages[-1].text.strip()
            others = other_times(recorder.rows, seconds)
            return RunResult(messages, seconds, metrics, others, shown, explain_speed(view.replies))
        start = Command(resume={interrupt.id: _ask_approval(interrupt, thread, ask) for interrupt in state.interrupts})


def _ask_approval(interrupt: Interrupt, thread: str, read: Callable[[], str]) -> dict[str, Any]:
    """Ask for a decision on each tool call at which LangChain's `HumanInTheLoopMiddleware` interrupted the graph."""
    stderr = Terminal(stderr=True)
    decisions: list[dict[str, str]] = []
    for request in interrupt.value["action_requests"]:
        stderr.print(f"\nMay {format_call(request['name'], request['args'])} be called?", style="bold", soft_wrap=True)
        stderr.print("yes, or why not: ", end="")
        try:
            answer = read().strip()
        except EOFError:
            problem = f"nobody answers whether {request['name']} may be called"
            raise ApprovalNeededError(f"{problem}: resume with --thread {thread}") from None
        if answer.lower() in ("y", "yes"):
            decisions.append({"type": "approve"})
            continue
        why = "." if answer.lower() in ("", "n", "no") else f": {answer}"
        decisions.append({"type": "reject", "message": f"The user does not want this call{why}"})
    return {"decisions": decisions}


class RunView(BaseCallbackHandler):
    """Prints a graph's stream on a thread with earlier `messages`; as a callback it notes the node of each call."""

    def __init__(self, show: Terminal, messages: Sequence[AnyMessage] = ()) -> None:
        self._show = show
        self._names: dict[str, str] = {}
        self._calls = {call["id"]: call for one in messages if isinstance(one, AIMessage) for call in one.tool_calls}
        self._results = 0
        self._title = ""
        self._shown_id: str | None = None  # Id of the reply that is being printed; texts of others wait
        self._pending: dict[str, str] = {}
        self._plain_text, self._wrap = PlainTextStream(), show.word_wrap()
        self._texts: list[str] = []
        self.last_text = ""  # Text of the last reply, if nothing was printed after it
        self.replies: list[tuple[AIMessage, Mapping[str, Any]]] = []  # Replies with their metadata

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        """Note the metadata of replies."""
        self.replies += replies(response)

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Note the node of a call."""
        named = (kwargs.get("invocation_params") or {}).get("node")
        self._names[str(run_id)] = str(named or (kwargs.get("metadata") or {}).get("langgraph_node", "model"))

    def piece(self, chunk: BaseMessage) -> None:
        """Print a chunk of a reply; concurrent replies are printed one after the other."""
        if not isinstance(chunk, BaseMessageChunk) or chunk.id is None:
            return
        if self._shown_id in (None, chunk.id):
            self._text(chunk.id, chunk.text)
        else:
            self._pending[chunk.id] = self._pending.get(chunk.id, "") + chunk.text
        if getattr(chunk, "chunk_position", None) == "last" and chunk.id == self._shown_id:
            self._end()

    def update(self, event: dict[str, Any]) -> None:
        """Print the tool results of a state update, each below its call."""
        for update in event.values():
            messages = update.get("messages", ()) if isinstance(update, dict) else ()
            for message in getattr(messages, "value", messages):  # LangGraph's `Overwrite` wraps them
                if isinstance(message, AIMessage):
                    self._calls |= {call["id"]: call for call in message.tool_calls}
                elif isinstance(message, ToolMessage):
                    self._result(message)

    def _text(self, reply: str, text: str) -> None:
        if text and self._shown_id is None:
            self._shown_id, self._plain_text, self._wrap = reply, PlainTextStream(), self._show.word_wrap()
            self._texts = []
            # LangChain's id of a message ends with that of its run.
            self._section(self._names.get(reply[-36:], "model"))
        if text:
            self._texts.append(text)
            self._show.print(self._wrap.feed(self._plain_text.feed(text)), end="", soft_wrap=True)

    def _section(self, title: str) -> None:
        if title != self._title:
            self._show.print_heading(title)
        self._title = title

    def _end(self) -> None:
        if self._shown_id is not None:
            self._show.print(self._wrap.feed(self._plain_text.end()) + self._wrap.end(), soft_wrap=True)
            self.last_text = "".join(self._texts)
        self._shown_id = None
        if self._pending:
            reply, text = next(iter(self._pending.items()))
            del self._pending[reply]
            self._text(reply, text)

    def _result(self, message: ToolMessage) -> None:
        while self._shown_id is not None:
            self._end()
        self._section("tools")
        self.last_text = ""
        self._results += 1
        call = self._calls.get(message.tool_call_id)
        call_text = format_call(call["name"], call["args"]) if call else message.name or "a call"
        failed = " failed" if message.status == "error" else ""
        text = message.text.strip() or "(nothing)"
        self._show.text("", label=f"[{self._results}] {call_text}{failed}")
        self._show.text(truncate(text, "the run has the rest", _MAX_LENGTH))


class LiveSteps(BaseCallbackHandler):
    """Prints a line for each step event: the model or verifier, the outcome, the duration, and the step's text."""

    def __init__(self, show: Terminal) -> None:
        self._show = show

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        """Print a step event."""
        if name != STEP_EVENT or data["kind"] not in _STYLES:
            return
        who = "verifier" if data["kind"] == "judged" else data["source"]
        verdict = f", {data['verdict']}" if data["verdict"] else ""
        line = Text.assemble(
            (f"{data['path'] or '(no node)'}  ", "bold"),
            (f"step {data['position'] + 1}: {who} {data['kind']}", _STYLES[data["kind"]]),
            (f"{verdict}, {data['ended'] - data['started']:.1f} s  ", "bright_black"),
            " ".join(data["text"].split()),
        )
        self._show.print(line, no_wrap=True, overflow="ellipsis")


def explain_speed(known: Sequence[tuple[AIMessage, Mapping[str, Any]]]) -> str:
    """Say why replies have no draft steps, and which precision and draft tokens made them fast; empty: neither."""
    reports = [report for _, report in known]
    lines = []
    if reports and all(report["mode"] in _WITHOUT_STEPS for report in reports):
        # A policy without draft steps explains itself, unless all nodes have one.
        last = ([report for report in reports if report["policy"] != "off"] or reports)[-1]
        reason = last["speculation_disabled"] or last["mode_reason"]
        # Drafting tokens in the target's engine says that the draft has no engine of its own.
        why = "" if (last["mode"], reason) == ("sd", NO_DRAFT) else f" ({reason})"
        lines.append(f"No draft steps in this run: {_WITHOUT_STEPS[last['mode']]}{why}.")
    engines = reports[-1]["engines"] if reports else {}
    precision, method = engines.get("precision", {}).get("target"), engines.get("speculation_method", "none")
    passes = sum(report["target_forward_passes"] for report in reports)
    tokens = sum(message.usage_metadata["output_tokens"] for message, _ in known if message.usage_metadata)
    causes = [f"{precision} weights"] if precision == "int8" else []
    if method != "none" and passes:
        causes.append(f"draft tokens by {method}, {tokens / passes:.1f} tokens in a forward pass of the target")
    if causes:
        lines.append(f"Replies are fast by {' and '.join(causes)}.")
    return "\n".join(lines)


def other_times(rows: Sequence[Mapping[str, Any]], seconds: float) -> list[tuple[str, float]]:
    """Return the seconds of a run in which no node replies, from the rows of its trace; none below a tenth."""
    spans = [replace(span, node="(tools)") if span.is_tool else span for span in spans_of(rows)]
    starts = [row["started"] for row in rows if row["type"] == "run"]
    before = max(0.0, min(span.start for span in spans) - min(starts)) if spans and starts else 0.0
    times = [(each.node, each.seconds) for each in node_times(spans, seconds, before) if not each.replies]
    return [(name, spent) for name, spent in times if spent >= _LEAST_SECONDS]


def node_table(nodes: Sequence[dict[str, Any]], others: Sequence[tuple[str, float]] = ()) -> Table:
    """Build a table of each node's replies, accepted steps, tokens and times, and of the `other_times` of the run."""
    rows = [
        [
            str(node["node"]),
            node["policy"].partition(":")[0],  # the policy without its options, which would not fit
            str(node["replies"]),
            # The draft wrote nothing if every reply was an action, or the target's alone.
            f"{node['accepted']}/{node['steps']}" if any(node["tokens"]["draft"].values()) else "–",
            str(node["output_tokens"]),
            f"{node['output_tokens'] / max(1, node['target_forward_passes']):.1f}",
            "{cached}/{total}".format(**node["prompt_tokens"]["target"]).replace("None", "?"),
            f"{node['seconds']['prompt']:.1f}",
            f"{node['seconds']['total']:.1f}",
        ]
        for node in nodes
    ]
    rows += [[name, *[""] * 7, f"{seconds:.1f}"] for name, seconds in others]
    headings = ["node", "policy", "calls", "steps", "tokens", "a pass", "cached", "prompt", "total"]
    return as_rich((headings, rows), words=("policy",))
