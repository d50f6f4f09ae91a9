"""Records what happens to each step of each reply, as lines of JSON."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from lookahead_agent.agents.figures import replies
from lookahead_agent.chat.step_callbacks import STEP_EVENT
from lookahead_agent.errors import ConfigurationError

Row = dict[str, Any]

_VERSION = 1


class TraceRecorder(BaseCallbackHandler):
    """Records the calls of `ChatLookahead` models in a graph or chain.

    Give it to the graph: `graph.invoke(..., {"callbacks": [recorder]})`. Rows are written as they come, so that an
    interrupted run leaves what there was.

    Args:
        path: File that rows are appended to; None: they are only kept.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.rows: list[Row] = []
        self._started = time.time()
        self._lock = threading.Lock()
        # It stays open from one callback to the next.
        self._file: TextIO | None = open(path, "a", encoding="utf-8") if path is not None else None  # noqa: SIM115
        self._add({"type": "trace", "version": _VERSION, "started": self._started})

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record what happened to a step."""
        if name == STEP_EVENT:
            self._add({"type": "step", "at": time.time() - self._started, **data})

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Record a reply."""
        for message, figures in replies(response):
            self._add(
                {
                    "type": "reply",
                    "at": time.time() - self._started,
                    "text": message.text,
                    "tool_calls": [{"name": call["name"], "args": call["args"]} for call in message.tool_calls],
                    "usage": message.usage_metadata,
                    **figures,
                }
            )

    def _add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            if self._file is not None:
                self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(path: str | Path) -> list[Row]:
    """The rows of a recorded run. A line that was cut off by an interruption is left out.

    Raises:
        ConfigurationError: It is no such file, or one of a newer version.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ConfigurationError(f"{path}, line {number} is not JSON: is it a trace?") from error
        if not isinstance(row, dict) or "type" not in row:
            raise ConfigurationError(f"{path}, line {number} is no row of a trace")
        if row["type"] == "trace" and row.get("version", 0) > _VERSION:
            raise ConfigurationError(f"{path} was recorded by a newer version of lookahead-agent")
        rows.append(row)
    if not any(row["type"] == "trace" for row in rows):
        raise ConfigurationError(f"{path} is no trace: record one with lookahead-agent agent --trace run.jsonl")
    return rows
