"""Measures the model calls of one sample."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import LLMResult

from lookahead_agent.bench.samples import CallRecord, StepTimes
from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.trace.recorder import replies


class CallRecorder(BaseCallbackHandler):
    """Collects a record of each model call of a sample.

    Give it to the model or graph: `graph.invoke(..., {"callbacks": [recorder]})`. Cancelled calls leave no record:
    LangChain reports nothing of them.
    """

    def __init__(self) -> None:
        self.calls: list[CallRecord] = []
        self._origin = time.monotonic()
        self._lock = threading.Lock()
        self._started: dict[UUID, float] = {}
        self._first: dict[UUID, float] = {}
        self._steps: dict[str, list[tuple[float, dict[str, Any]]]] = {}

    def elapsed(self) -> float:
        """Seconds since the sample began."""
        return time.monotonic() - self._origin

    def on_chat_model_start(self, serialized: dict[str, Any], messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the begin of a call."""
        with self._lock:
            self._started[run_id] = time.monotonic()

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note its first committed token."""
        if token:
            with self._lock:
                self._first.setdefault(run_id, time.monotonic())

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note an event of a step."""
        if name == STEP_EVENT:
            with self._lock:
                self._steps.setdefault(data["call"], []).append((time.monotonic(), data))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Complete the call."""
        ended = time.monotonic()
        for message, figures in replies(response):
            with self._lock:
                self._add(message, figures, run_id, ended)

    def _add(self, message: AIMessage, figures: Mapping[str, Any], run_id: UUID, ended: float) -> None:
        started = self._started.pop(run_id, ended - figures["seconds"]["total"])
        first = self._first.pop(run_id, None)
        events = self._steps.pop(figures["call"], [])
        usage = message.usage_metadata
        self.calls.append(
            CallRecord(
                node=figures["node"],
                policy=figures["policy"],
                started=started - self._origin,
                seconds=ended - started,
                first_token=first - started if first is not None else None,
                prompt_tokens=usage["input_tokens"] if usage else 0,
                output_tokens=usage["output_tokens"] if usage else 0,
                steps=figures["steps"],
                accepted=figures["accepted"],
                verifier_calls=figures["verifier_calls"],
                judge_calls=figures["judge_calls"],
                tokens=figures["tokens"],
                busy=figures["seconds"],
                speculation_disabled=figures["speculation_disabled"],
                times=_times(events, started),
                token_ids=message.response_metadata.get("token_ids"),
            )
        )


def _times(events: list[tuple[float, dict[str, Any]]], started: float) -> StepTimes:
    return StepTimes(
        verifier=[data["ended"] - data["started"] for _, data in events if data["kind"] == "judged"],
        committed=[at - started for at, data in events if data["kind"] in ("accepted", "committed")],
    )
