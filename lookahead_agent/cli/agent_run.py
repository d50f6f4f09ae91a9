"""One run of a graph on the terminal: its texts as they are written, its calls and results, and what it asks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, BaseMessageChunk, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Interrupt
from rich.table import Table
from rich.text import Text

from lookahead_agent.agents.metrics import NodeMetrics
from lookahead_agent.agents.prompts import call_text
from lookahead_agent.cli.terminal import Terminal, as_rich
from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.errors import LookaheadError
from lookahead_agent.plain_text import PlainTextStream
from lookahead_agent.trace.recorder import TraceRecorder

_LONGEST = 2000  # Characters of a result that are shown
# The page's colours, as near as terminals have them.
_STYLES = {
    "accepted": "green",
    "committed": "blue",
    "rejected": "red",
    "unused": "bright_blue",
    "aborted": "bright_black",
    "judged": "yellow",
}


class ApprovalNeededError(LookaheadError):
    """A run waits for an approval, and there is nobody to ask."""


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    messages: Sequence[AnyMessage]  # of the thread
    seconds: float  # how long it ran, without the time in which it waited for a person
    metrics: NodeMetrics  # what its nodes did

    @property
    def answer(self) -> str:
        """The last message's text."""
        return self.messages[-1].text


def carry_out(
    graph: Any,
    start: Any,
    thread: str,
    show: Terminal,
    *,
    recorder: TraceRecorder | None = None,
    live: bool = False,
    ask: Callable[[], str] = input,
) -> Finished:
    """Run a graph with a checkpointer to its end, and ask on the terminal where it stops for an approval.

    Without a `start` it goes on where the thread stopped. `live` shows what happens to each step in place of texts.
    Raises ApprovalNeededError where it asks, and standard input has ended; the thread can be resumed.
    """
    metrics = NodeMetrics()
    config: RunnableConfig = {"configurable": {"thread_id": thread}}
    view = RunView(show, graph.get_state(config).values.get("messages", ()))
    config["callbacks"] = [metrics, view, *([recorder] if recorder else []), *([LiveSteps(show)] if live else [])]
    seconds = 0.0
    while True:
        begun = time.monotonic()
        for mode, event in graph.stream(start, config, stream_mode=["messages", "updates"]):
            if mode == "updates":
                view.update(event)
            elif not live:
                view.piece(event[0])
        seconds += time.monotonic() - begun
        state = graph.get_state(config)
        if not state.interrupts:
            return Finished(state.values["messages"], seconds, metrics)
        start = Command(resume={one.id: _decided(one, thread, ask) for one in state.interrupts})


def _decided(waiting: Interrupt, thread: str, read: Callable[[], str]) -> dict[str, Any]:
    """A person's decisions about the calls before which LangChain's `HumanInTheLoopMiddleware` stopped."""
    ask = Terminal(stderr=True)
    decisions: list[dict[str, str]] = []
    for request in waiting.value["action_requests"]:
        ask.print(f"\nMay {call_text(request['name'], request['args'])} be called?", style="bold", soft_wrap=True)
        ask.print("yes, or why not: ", end="")
        try:
            said = read().strip()
        except EOFError:
            nobody = f"nobody answers whether {request['name']} may be called"
            raise ApprovalNeededError(f"{nobody}: resume with --thread {thread}") from None
        if said.lower() in ("y", "yes"):
            decisions.append({"type": "approve"})
            continue
        why = "." if said.lower() in ("", "n", "no") else f": {said}"
        decisions.append({"type": "reject", "message": f"The user does not want this call{why}"})
    return {"decisions": decisions}


class RunView(BaseCallbackHandler):
    """Shows what a graph streams, on a thread with these messages; as a callback it is told the name of each call."""

    def __init__(self, show: Terminal, messages: Sequence[AnyMessage] = ()) -> None:
        self._show = show
        self._names: dict[str, str] = {}
        self._calls = {call["id"]: call for one in messages if isinstance(one, AIMessage) for call in one.tool_calls}
        self._results = 0
        self._title = ""
        self._written: str | None = None  # Of the reply whose text is being shown, the id; the texts of others wait
        self._waiting: dict[str, str] = {}
        self._pieces = PlainTextStream()

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Note the name of a call."""
        named = (kwargs.get("invocation_params") or {}).get("node")
        self._names[str(run_id)] = str(named or (kwargs.get("metadata") or {}).get("langgraph_node", "model"))

    def piece(self, chunk: BaseMessage) -> None:
        """Show a piece of a reply's text; replies that are written at once are shown one after the other."""
        if not isinstance(chunk, BaseMessageChunk) or chunk.id is None:
            return
        if self._written in (None, chunk.id):
            self._text(chunk.id, chunk.text)
        else:
            self._waiting[chunk.id] = self._waiting.get(chunk.id, "") + chunk.text
        if getattr(chunk, "chunk_position", None) == "last" and chunk.id == self._written:
            self._end()

    def update(self, event: dict[str, Any]) -> None:
        """Show the results that a node adds, each below its call."""
        for update in event.values():
            messages = update.get("messages", ()) if isinstance(update, dict) else ()
            for message in getattr(messages, "value", messages):  # of one that overwrites others
                if isinstance(message, AIMessage):
                    self._calls |= {call["id"]: call for call in message.tool_calls}
                elif isinstance(message, ToolMessage):
                    self._result(message)

    def _text(self, reply: str, text: str) -> None:
        if text and self._written is None:
            self._written, self._pieces = reply, PlainTextStream()
            # LangChain's id of a message ends with that of its run.
            self._section(self._names.get(reply[-36:], "model"))
        if text:
            self._show.print(self._pieces.feed(text), end="", soft_wrap=True)

    def _section(self, title: str) -> None:
        if title != self._title:
            self._show.heading(title)
        self._title = title

    def _end(self) -> None:
        if self._written is not None:
            self._show.print(self._pieces.end(), soft_wrap=True)
        self._written = None
        if self._waiting:
            reply, text = next(iter(self._waiting.items()))
            del self._waiting[reply]
            self._text(reply, text)

    def _result(self, message: ToolMessage) -> None:
        while self._written is not None:
            self._end()
        self._section("tools")
        self._results += 1
        call = self._calls.get(message.tool_call_id)
        called = call_text(call["name"], call["args"]) if call else message.name or "a call"
        failed = " failed" if message.status == "error" else ""
        text = message.text.strip() or "(nothing)"
        more = f"\n… ({len(text):,} characters)" if len(text) > _LONGEST else ""
        self._show.print(f"[{self._results}] {called}{failed}", style="bold", soft_wrap=True)
        self._show.print(text[:_LONGEST] + more, soft_wrap=True)


class LiveSteps(BaseCallbackHandler):
    """Shows a line for each thing that happens to a step: who wrote or judged it, how long that took, and its text."""

    def __init__(self, show: Terminal) -> None:
        self._show = show

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        """Show what happened to a step."""
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


def node_table(nodes: Sequence[dict[str, Any]]) -> Table:
    """What each node did: its replies, and what speculation did for them."""
    rows = [
        [
            str(node["node"]),
            node["policy"].partition(":")[0],  # its name: what it changes of that would take a line of its own
            str(node["replies"]),
            # Nothing was there to accept where every reply was an action (or the target alone).
            f"{node['accepted']}/{node['steps']}" if any(node["tokens"]["draft"].values()) else "–",
            str(node["output_tokens"]),
            f"{node['output_tokens'] / max(1, node['target_forward_passes']):.1f}",
            "{cached}/{total}".format(**node["prompt_tokens"]["target"]).replace("None", "?"),
            f"{node['seconds']['prompt']:.1f}",
            f"{node['seconds']['total']:.1f}",
        ]
        for node in nodes
    ]
    headings = ["node", "policy", "calls", "steps", "tokens", "a pass", "cached", "prompt", "total"]
    return as_rich((headings, rows), words=("policy",))
