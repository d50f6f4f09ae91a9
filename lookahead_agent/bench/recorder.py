"""Measures the model calls and tool calls of one sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult

from lookahead_agent.bench.samples import CallRecord, ToolRecord
from lookahead_agent.chat.messages import THINKING_KEY
from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.jsonl import Row
from lookahead_agent.trace.recorder import RunRecorder, replies


class CallRecorder(RunRecorder):
    """Collects a record of each model call and of each tool's run of a sample.

    Give it to the model or graph: `graph.invoke(..., {"callbacks": [recorder]})`. Cancelled calls leave no record:
    LangChain reports nothing of them.

    Args:
        decode: Text of a reply's tokens, for its actions as the model wrote them; None: these are not recorded.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        super().__init__()
        self.calls: list[CallRecord] = []
        self.tools: list[ToolRecord] = []
        self._decode = decode
        self._started: dict[UUID, tuple[float, Sequence[str]]] = {}
        self._first: dict[UUID, float] = {}
        self._verdicts: dict[str, list[float]] = {}

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Note the begin of a call, its prompt, and its action markers."""
        super().on_chat_model_start(serialized, messages, run_id=run_id, **kwargs)
        markers = (kwargs.get("invocation_params") or {}).get("action_markers") or ()
        with self._lock:
            self._started[run_id] = self._now(), markers

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note its first committed token."""
        if token:
            with self._lock:
                self._first.setdefault(run_id, self._now())

    def _add_tool(self, row: Row) -> None:
        self.tools.append(ToolRecord(**row))

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the duration of a verdict."""
        if name == STEP_EVENT and data["kind"] == "judged":
            with self._lock:
                self._verdicts.setdefault(data["call"], []).append(data["ended"] - data["started"])

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Complete the call."""
        ended = self._now()
        for message, figures in replies(response):
            prompt = self._of_prompt(run_id, message)
            with self._lock:
                self._add(message, figures, prompt, run_id, ended)

    def _add(self, message: AIMessage, figures: Mapping[str, Any], prompt: Row, run_id: UUID, ended: float) -> None:
        started, markers = self._started.pop(run_id, (ended - figures["seconds"]["total"], ()))
        first = self._first.pop(run_id, None)
        usage = message.usage_metadata
        tokens = message.response_metadata.get("token_ids")
        self.calls.append(
            CallRecord(
                node=figures["node"],
                path=figures["path"],
                **prompt,
                policy=figures["policy"],
                started=started - self._began,
                seconds=ended - started,
                first_token=first - started if first is not None else None,
                prompt_tokens=usage["input_tokens"] if usage else 0,
                cached_tokens=figures["prompt_tokens"]["target"]["cached"],
                output_tokens=usage["output_tokens"] if usage else 0,
                passes=figures["target_forward_passes"],
                steps=figures["steps"],
                accepted=figures["accepted"],
                verifier_calls=figures["verifier_calls"],
                judge_calls=figures["judge_calls"],
                tokens=figures["tokens"],
                busy=figures["seconds"],
                speculation_disabled=figures["speculation_disabled"],
                verdicts=self._verdicts.pop(figures["call"], []),
                token_ids=tokens,
                action=action_of(self._decode(tokens), message, markers) if self._decode and tokens else None,
            )
        )


def action_of(written: str, message: AIMessage, markers: Sequence[str] = ()) -> str | None:
    """The part of a reply that acts, as the model wrote it; None: it has none.

    Args:
        written: All that the model wrote.
        message: The reply that was read in it.
        markers: Texts that begin an action, beside those of tool calls.
    """
    begins = [at for marker in markers if (at := written.find(marker)) >= 0]
    if begins:
        return written[min(begins) :]
    if not (message.tool_calls or message.invalid_tool_calls):
        return None
    for passed in (message.additional_kwargs.get(THINKING_KEY), message.text):
        if passed:
            written = written.rpartition(passed)[2]
    return written.lstrip()
