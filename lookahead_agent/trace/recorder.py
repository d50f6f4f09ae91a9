"""Records what happens to each step of each reply, as lines of JSON."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.jsonl import Row, RowFile, append_line, end_at_whole_line

logger = logging.getLogger(__name__)

_VERSION = 1


def replies(response: LLMResult) -> Iterator[tuple[AIMessage, dict[str, Any]]]:
    """The replies of a `ChatLookahead` in a callback's result, each with its `lookahead` metadata."""
    for generations in response.generations:
        for generation in generations:
            message = generation.message if isinstance(generation, ChatGeneration) else None
            if isinstance(message, AIMessage) and "lookahead" in message.response_metadata:
                yield message, message.response_metadata["lookahead"]


class TraceRecorder(BaseCallbackHandler):
    """Records the calls of `ChatLookahead` models in a graph or chain.

    Give it to the graph: `graph.invoke(..., {"callbacks": [recorder]})`. Each row is written at once, so that an
    interrupted run leaves what there was.

    Args:
        path: File that rows are appended to; None: they are only kept.
        now: Clock in seconds by which rows have their places; it must not jump, as a machine's date may.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, path: str | Path | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.rows: list[Row] = []
        self._now = now
        self._began = now()
        self._lock = threading.Lock()
        self._path = path
        self._file = _opened(Path(path)) if path is not None else None
        self._failure: OSError | None = None
        self._add({"type": "trace", "version": _VERSION, "started": time.time()})

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record what happened to a step."""
        if name == STEP_EVENT:
            self._add({"type": "step", "at": self._now() - self._began, **data})

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Record a reply."""
        for message, figures in replies(response):
            self._add(
                {
                    "type": "reply",
                    "at": self._now() - self._began,
                    "text": message.text,
                    "tool_calls": [{"name": call["name"], "args": call["args"]} for call in message.tool_calls],
                    "usage": message.usage_metadata,
                    **figures,
                }
            )

    def _add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            if self._file is not None and self._failure is None:
                try:
                    append_line(self._file, row)
                except OSError as error:  # `close` raises it once: a callback's errors end no run
                    self._failure = error

    def close(self) -> None:
        """Close the file.

        Raises:
            ConfigurationError: The disk was full, or the file could not be written for another reason; all rows from
                then on are missing in it.
        """
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            failure, self._failure = self._failure, None
        if failure is not None:
            raise ConfigurationError(
                f"{self._path} cannot be written: {failure.strerror or failure}. The trace ends where this happened"
            ) from failure

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except ConfigurationError as error:
            if kind is None:
                raise
            logger.warning("%s", error)  # the run's own error goes first


def _opened(path: Path) -> FileIO:
    """A file to append rows to; what an interruption left of a row at its end is taken off."""
    if path.is_file():
        with path.open("r+b") as before:
            end_at_whole_line(before)
    # It stays open from one callback to the next.
    return open(path, "ab", buffering=0)


def read_trace(path: str | Path) -> list[Row]:
    """The rows of a recorded run. A line that was cut off by an interruption is left out.

    Raises:
        ConfigurationError: It is no such file, or one of a newer version.
    """
    if not Path(path).exists():
        raise ConfigurationError(f"{path} cannot be read: there is no such file")
    rows = RowFile(Path(path)).rows
    for row in rows:
        if "type" not in row:
            raise ConfigurationError(f"{path} has a line that is no row of a trace")
        if row["type"] == "trace" and row.get("version", 0) > _VERSION:
            raise ConfigurationError(f"{path} was recorded by a newer version of lookahead-agent")
    if not any(row["type"] == "trace" for row in rows):
        raise ConfigurationError(f"{path} is no trace: record one with lookahead-agent agent --trace run.jsonl")
    return rows
