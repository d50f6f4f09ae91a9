"""Records step events, replies and tool runs as JSON lines."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import node_path
from lookahead_agent.system.jsonl import Row, RowFile
from lookahead_agent.system.texts import truncate

logger = logging.getLogger(__name__)

_VERSION = 1
_MAX_LENGTH = 20_000  # characters of a question, an answer or a result in a trace
_REST = "a trace has no more of a text"

_PIECE = re.compile(r"\s?\w+|[^\w\s]|\s+")
"""An approximation of a token: callbacks get the texts of prompts, but not their token ids."""
_CONTEXT, _PROPOSED = 2, 4  # Tokens that a prompt lookup matches, and draft tokens that it proposes


def replies(response: LLMResult) -> Iterator[tuple[AIMessage, dict[str, Any]]]:
    """Yield the replies that a `ChatLookahead` wrote for a call, each with its `lookahead` metadata."""
    for message in messages_of(response):
        if "lookahead" in message.response_metadata:
            yield message, message.response_metadata["lookahead"]


def messages_of(response: LLMResult) -> list[AIMessage]:
    """Return the replies that any chat model wrote for a call.

    Replies from LangChain's cache are left out: their metadata are those of the call that wrote them.
    """
    messages = [chat.message for group in response.generations for chat in group if isinstance(chat, ChatGeneration)]
    return [message for message in messages if isinstance(message, AIMessage) and not _is_cached(message)]


def _is_cached(message: AIMessage) -> bool:
    # LangChain states the cost of replies from its cache, and only theirs.
    usage: Mapping[str, Any] = message.usage_metadata or {}
    return usage.get("total_cost") == 0


class RunRecorder(BaseCallbackHandler):
    """Base of the recorders of a run: records tool runs and features of prompts."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._lock = threading.Lock()
        self._prompts: dict[UUID, tuple[str, Row]] = {}
        self._tools: dict[UUID, Row] = {}

    def measure_elapsed(self) -> float:
        """Seconds since the run began."""
        return self._now() - self._began

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Note the features of a prompt."""
        parameters = kwargs.get("invocation_params") or {}
        text, new_share = shape_of_prompt(messages[0] if messages else [], parameters.get("tools"))
        step = (kwargs.get("metadata") or {}).get("langgraph_step")
        with self._lock:
            self._prompts[run_id] = text, {"new_share": new_share, "step": step}

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Discard the prompt of a failed reply."""
        self._discard_prompt(run_id)

    def _discard_prompt(self, run_id: UUID) -> None:
        with self._lock:
            self._prompts.pop(run_id, None)

    def _of_prompt(self, run_id: UUID, message: AIMessage) -> Row:
        """Remove and return the features of a reply's prompt: `new_share`, `lookup_passes` and `step`."""
        with self._lock:
            text, known = self._prompts.pop(run_id, ("", {}))
        return known | {"lookup_passes": lookup_passes(text, text_of(message))}

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note the start of a tool run, and its arguments."""
        graph_metadata = metadata or {}
        row = {
            "path": node_path(graph_metadata) or None,
            "step": graph_metadata.get("langgraph_step"),
            "name": (serialized or {}).get("name") or kwargs.get("name") or "",
            "arguments": input_str if inputs is None else json.dumps(inputs, ensure_ascii=False, default=str),
            "started": self.measure_elapsed(),
        }
        with self._lock:
            self._tools[run_id] = row

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the completed tool run."""
        text = output.text if isinstance(output, BaseMessage) else str(output)
        self._end_tool(run_id, getattr(output, "status", None) == "error", text)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the failed tool run."""
        self._end_tool(run_id, True, str(error) or type(error).__name__)

    def _end_tool(self, run_id: UUID, failed: bool, result: str) -> None:
        with self._lock:
            row = self._tools.pop(run_id, None)
        if row is not None:
            self._add_tool(row | {"seconds": self.measure_elapsed() - row["started"], "failed": failed}, result)

    def _add_tool(self, row: Row, result: str) -> None:
        raise NotImplementedError


class TraceRecorder(RunRecorder):
    """Records the calls of `ChatLookahead` models in a graph or chain: `graph.invoke(..., {"callbacks": [recorder]})`.

    Use it as a context manager, or call `close`.

    Args:
        path: File to which each row is appended at once; None: rows are only kept in memory.
        now: Monotonic clock in seconds for the times of rows.
    """

    def __init__(self, path: str | Path | None = None, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self._runs: dict[UUID, Row] = {}
        self.rows: list[Row] = []
        self._file = RowFile(Path(path)) if path is not None else None
        if self._file is not None:
            self._file.end_at_whole_line()
        self._failure: ConfigurationError | None = None
        self._add({"type": "trace", "version": _VERSION, "started": time.time()})

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record a step event."""
        if name == STEP_EVENT:
            self._add({"type": "step", "at": self.measure_elapsed(), **data})

    def _add_tool(self, row: Row, result: str) -> None:
        self._add({"type": "tool", **row, "result": truncate(result, _REST, _MAX_LENGTH)})

    def on_chain_start(
        self, serialized: dict[str, Any], inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **_: Any
    ) -> None:
        """Note when a graph or chain begins, and its question."""
        if parent_run_id is None:
            with self._lock:
                self._runs[run_id] = {"started": self.measure_elapsed(), "question": _last_text(inputs)}

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        """Record the run of a graph or chain, with its answer."""
        self._end_run(run_id, _last_text(outputs), failed=False)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """Record the run of a graph or chain that failed, or that waits for an approval."""
        self._end_run(run_id, "", failed=True)

    def _end_run(self, run_id: UUID, answer: str, *, failed: bool) -> None:
        with self._lock:
            row = self._runs.pop(run_id, None)
        if row is not None:
            row |= {"seconds": self.measure_elapsed() - row["started"], "answer": answer, "failed": failed}
            self._add({"type": "run", **row})

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Record a reply."""
        for message, figures in replies(response):
            calls = [{"name": call["name"], "args": call["args"]} for call in message.tool_calls]
            row = {"type": "reply", "at": self.measure_elapsed(), "text": message.text, "tool_calls": calls}
            self._add({**row, "usage": message.usage_metadata, **self._of_prompt(run_id, message), **figures})
        self._discard_prompt(run_id)  # The prompt is one of a cached reply, or of another model

    def _add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            if self._file is not None and self._failure is None:
                try:
                    self._file.append(row)
                except ConfigurationError as error:  # raised by `close`, since LangChain only logs errors of callbacks
                    self._failure = error

    def close(self) -> None:
        """Close the file; raises ConfigurationError if rows could not be written, for example to a full disk."""
        with self._lock:
            failure, self._failure, self._file = self._failure, None, None
        if failure is not None:
            raise failure

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except ConfigurationError as error:
            if kind is None:
                raise
            logger.warning("%s", error)  # the run's own error takes precedence


def read_trace(path: str | Path) -> list[Row]:
    """Read the rows of a trace; raises ConfigurationError if the file is not a trace or of a newer version."""
    if not Path(path).exists():
        raise ConfigurationError(f"{path} cannot be read: there is no such file")
    rows = RowFile(Path(path)).rows
    for row in rows:
        if "type" not in row:
            raise ConfigurationError(f"{path} has a line that is not a row of a trace")
        if row["type"] == "trace" and row.get("version", 0) > _VERSION:
            raise ConfigurationError(f"{path} was recorded by a newer version of lookahead-agent")
    if not any(row["type"] == "trace" for row in rows):
        raise ConfigurationError(f"{path} is not a trace: record one with lookahead-agent agent --trace run.jsonl")
    return rows


def _last_text(state: Any) -> str:
    """Return the text of the last message of a graph's input or output, or of a text; else nothing."""
    messages = state.get("messages") if isinstance(state, Mapping) else state
    last = messages[-1] if isinstance(messages, list) and messages else messages
    if isinstance(last, tuple | list) and len(last) == 2:  # role and text
        last = last[1]
    if isinstance(last, Mapping):
        last = last.get("content")
    text = last.text if isinstance(last, BaseMessage) else last
    return truncate(text, _REST, _MAX_LENGTH) if isinstance(text, str) else ""


def shape_of_prompt(messages: Sequence[BaseMessage], tools: Any = None) -> tuple[str, float]:
    """Return the text of a prompt with its tools, and the share of the text that is the last message."""
    texts = [json.dumps(tools, default=str) if tools else "", *map(text_of, messages)]
    length = sum(map(len, texts))
    return "\n".join(texts), len(texts[-1]) / length if length else 1.0


def text_of(message: BaseMessage) -> str:
    """Return the text of a message with the arguments of its tool calls."""
    calls = getattr(message, "tool_calls", None)
    return message.text + (json.dumps([call["args"] for call in calls]) if calls else "")


def lookup_passes(prompt: str, reply: str) -> float:
    """Simulate prompt lookup with `_CONTEXT` and `_PROPOSED` tokens; return the forward passes per token."""
    before, written = _PIECE.findall(prompt), _PIECE.findall(reply)
    pieces, following = before + written, dict[tuple[str, ...], int]()
    passes, at, seen = 0, len(before), _CONTEXT
    while at < len(pieces):
        for place in range(seen, at):  # exclusive: no token follows `at` yet
            following[tuple(pieces[place - _CONTEXT : place])] = place
        seen = max(seen, at)
        begin, accepted = following.get(tuple(pieces[max(0, at - _CONTEXT) : at])), 0
        while (
            begin is not None
            and accepted < _PROPOSED
            and at + accepted < len(pieces)
            and begin + accepted < at
            and pieces[begin + accepted] == pieces[at + accepted]
        ):
            accepted += 1
        passes += 1
        at += accepted + 1
    return passes / len(written) if written else 1.0
